"""Transfer task for distributed/compile-once.

A sequence of 10 numbers is cut over four ranks: ranks 0 to 2 hold three, rank 3 holds one. A
compiled function computes the root of the mean of x * x + 1 over the whole sequence, with one
all_reduce, and every rank gets the result. As written by a colleague it has two programs, since
one part is shorter.

Write `prepare(part, longest)`, which runs before compilation and returns two input tensors, and
`root_mean(a, b)`, which is compiled and takes them. Right is: with `compile_on_one_rank` all four
ranks have the same graph, shapes included; and the program of rank 0, run on all four ranks, gives
the right number on each.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.kit import RankRun, report, run_ranks

Inputs = tuple[torch.Tensor, ...]
LONGEST = 3


def part_of(rank: int) -> torch.Tensor:
    """What a rank holds of the sequence 1, 2, ..., 10."""
    return torch.arange(1.0, 11.0)[3 * rank : 3 * rank + 3]


def prepare(part: torch.Tensor, longest: int) -> Inputs:
    """The part, filled up, and which places are real: as data, the same shapes on all ranks."""
    padding = longest - len(part)
    values = torch.nn.functional.pad(part, (0, padding))
    return values, torch.arange(longest) < len(part)


def root_mean(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The root of the mean of x * x + 1 over the whole sequence."""
    squares = torch.where(real, values.square() + 1, 0.0).sum()
    both = torch.stack([squares, real.sum().to(values.dtype)])
    total = functional.all_reduce(both, "sum", dist.group.WORLD)
    return (total[0] / total[1]).sqrt()


def naive_lengths(part: torch.Tensor, longest: int) -> Inputs:
    """Wrong: parts of their own length, so the last rank has another program."""
    return part, torch.ones(len(part), dtype=torch.bool)


def naive_padding(part: torch.Tensor, longest: int) -> Inputs:
    """Wrong: one program, but the places that were filled up count as numbers."""
    values, real = prepare(part, longest)
    return values, torch.ones_like(real)


def naive_rank(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Wrong: which places are real is computed from the rank while tracing."""
    length = min(3, 10 - 3 * dist.get_rank())
    return root_mean(values, torch.arange(len(values)) < length)


WAYS: dict[str, tuple[Callable, Callable]] = {
    "right": (prepare, root_mean),
    "lengths": (naive_lengths, root_mean),
    "padding": (naive_padding, root_mean),
    "rank": (prepare, naive_rank),
}


def run_compiled(function: Callable, inputs: Inputs, compiler: Callable) -> torch.Tensor:
    """Compile `function` with `compiler`, with the switch on, and run it."""
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    with torch.compiler.config.patch(compile_on_one_rank=True):
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)


def graph_of(way: str, rank: int) -> str:
    """The graph that a rank of four traces."""
    codes: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        codes.append(graph.print_readable(print_output=False))  # with the shapes
        return graph

    before, function = WAYS[way]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        run_compiled(function, before(part_of(rank), LONGEST), keep)
    finally:
        dist.destroy_process_group()
    return codes[0]


def run_programs_of_rank_zero() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()

    def from_rank_zero(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        """A compiler that runs rank 0's code on every rank."""
        if dist.get_rank() == 0:
            store.set(f"code {way}", graph.code)
        names = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
        exec(store.get(f"code {way}").decode(), names)
        return lambda *arguments: names["forward"](graph, *arguments)

    ways = {"right": (prepare, root_mean), "padding": (naive_padding, root_mean)}
    ways["rank"] = (prepare, naive_rank)
    for way, (before, function) in ways.items():
        inputs = before(part_of(dist.get_rank()), LONGEST)
        report(way, value=run_compiled(function, inputs, from_rank_zero).item())
    dist.destroy_process_group()


@cache
def real_run() -> RankRun:
    """Every way that runs at all with the program of rank 0, on four real ranks."""
    return run_ranks(run_programs_of_rank_zero, 4, quiet=True)


def check_one_program(way: str) -> None:
    """Raise AssertionError where ranks have different graphs."""
    programs = {graph_of(way, rank) for rank in range(4)}
    assert len(programs) == 1, f"{len(programs)} programs"


def check_values(way: str) -> None:
    """Raise AssertionError unless rank 0's program gives the right number on four real ranks."""
    found = [event["value"] for event in real_run().events(way).values()]
    wanted = (sum(n * n + 1 for n in range(1, 11)) / 10) ** 0.5
    assert found == [pytest.approx(wanted)] * 4, f"numbers {found}, not {wanted}"


def test_all_ranks_have_one_program():
    check_one_program("right")


def test_the_program_of_rank_zero_is_right_on_real_ranks():
    check_values("right")


@pytest.mark.parametrize("way", ["lengths", "rank"])
def test_the_check_catches_several_programs(way: str):
    with pytest.raises(AssertionError, match="programs"):
        check_one_program(way)


def test_the_check_catches_padding_that_counts():
    check_one_program("padding")
    with pytest.raises(AssertionError, match="numbers"):
        check_values("padding")


def test_another_ranks_program_gives_wrong_numbers():
    with pytest.raises(AssertionError, match="numbers"):
        check_values("rank")
