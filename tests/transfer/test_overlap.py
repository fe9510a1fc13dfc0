"""Transfer task for distributed/overlap.

A layer centres its input before it projects it: `(x - mean) @ w`, where `mean` is the mean of each
column over the rows of **all** ranks, so one `all_reduce` of a single row. All ranks have as many
rows. In a trace, the large product always begins after the wait. To write the collective further
up in the function has not helped.

Write `centred(x, w)` again, with the same result up to rounding, so that the large product runs
while the mean travels.

Right is: one collective of one row, one large product, which stands between start and wait in the
generated code, and on real ranks the rows that one process computes from the whole batch.
"""

import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.kit import report, run_ranks

ROWS, WIDTH = 96, 64  # rows of a rank

# The solution.


def centred(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(x - mean) @ w is x @ w - mean @ w, and the large product needs no mean."""
    total = fc.all_reduce(x.sum(0, keepdim=True), "sum", dist.group.WORLD)
    mean = total / (x.shape[0] * dist.get_world_size())
    return x @ w - mean @ w


# Wrong solutions.


def naive_start_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The collective is in the first line, and the product still reads its result."""
    total = fc.all_reduce(x.sum(0, keepdim=True), "sum", dist.group.WORLD)
    return (x - total / (x.shape[0] * dist.get_world_size())) @ w


def naive_own_mean(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """In flight all right, and wrong: each rank divides by its own number of rows."""
    total = fc.all_reduce(x.sum(0, keepdim=True), "sum", dist.group.WORLD)
    return x @ w - total / x.shape[0] @ w


# The check.

SHAPE = r"(buf\d+) = empty_strided\w*\(\((\d+), "  # where a buffer is made
COLLECTIVE = r"torch\.ops\._c10d_functional\.(\w+?)_?\.default\((buf\d+|arg\d+_1)"
PRODUCT = r"extern_kernels\.\w*mm\(.*out=(buf\d+)"


@pytest.fixture(scope="module", autouse=True)
def own_cache() -> Iterator[None]:
    """Compiled code goes to a folder that is removed; it compiles sooner, and runs slower."""
    with (
        tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        torch._inductor.config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 0}),
    ):
        yield


@functools.cache
def order_of(function: Callable) -> list[str]:
    """Collectives, waits and products in the generated code, each with the rows of its tensor."""
    inputs = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    dist.destroy_process_group()
    rows = dict(re.findall(SHAPE, code))
    steps = []
    for line in code.splitlines():
        if call := re.search(COLLECTIVE, line):
            steps.append(f"{call[1]} {rows.get(call[2], '?')}")
        elif call := re.search(PRODUCT, line):
            steps.append(f"product {rows.get(call[1], '?')}")
    return steps


def check_order(function: Callable) -> None:
    """One row travels, and the one large product runs meanwhile."""
    steps = order_of(function)
    start, large, wait = "all_reduce 1", f"product {ROWS}", "wait_tensor 1"
    assert [s for s in steps if not s.startswith(("product", "wait"))] == [start], steps
    assert steps.count(large) == 1, steps
    assert steps.index(start) < steps.index(large) < steps.index(wait), f"exposed: {steps}"


def on_ranks() -> None:
    """Each rank has its own rows, and compares with what the whole batch gives."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same batch on all ranks
    batch = torch.randn(2 * ROWS, WIDTH) + torch.arange(2 * ROWS)[:, None] / ROWS
    w = torch.randn(WIDTH, WIDTH)
    mine = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    wanted = ((batch - batch.mean(0)) @ w)[mine]
    for function in (centred, naive_own_mean):
        error = (function(batch[mine], w) - wanted).abs().max()  # the order is checked elsewhere
        report(function.__name__, error=error.item())
    dist.barrier()


@functools.cache
def errors() -> dict[str, list[float]]:
    """The largest error of each rank, by function."""
    run = run_ranks(on_ranks, 2, quiet=True)
    names = (centred.__name__, naive_own_mean.__name__)
    return {name: [event["error"] for event in run.events(name).values()] for name in names}


def check_values(function: Callable) -> None:
    """What the ranks computed is what one process computes from the whole batch."""
    found = errors()[function.__name__]
    assert len(found) == 2 and max(found) < 1e-3, f"the result is off by {found}"


def test_the_large_product_hides_the_collective() -> None:
    check_order(centred)


def test_real_ranks_compute_what_one_process_does() -> None:
    check_values(centred)


def test_the_check_catches_an_exposed_collective() -> None:
    with pytest.raises(AssertionError, match="exposed"):
        check_order(naive_start_first)


def test_the_check_catches_a_wrong_mean() -> None:
    with pytest.raises(AssertionError, match="off by"):
        check_values(naive_own_mean)
