"""Transfer task for distributed/moe-dispatch.

A recommender has a table of item vectors that is too large for one process. So its rows are spread
over the ranks, and not evenly: `first[r]` is the first row of rank r, and `first[size]` is the
number of rows. A rank may hold no row at all. Each rank has a batch of item numbers, in any order,
with repeats, perhaps empty, and wants one vector per number.

Write `look_up(mine, first, wanted)`, where `mine` are the rows of this rank. It returns the vectors
in the order of `wanted`. Right is: the values are those of the whole table; after `backward` on
every rank, `mine.grad` is what the whole table would get for the batches of all ranks together;
and a rank asks for a row once, however often it stands in its batch.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

from course.kit import report, run_ranks

FIRST = [0, 5, 5, 18, 24]  # rank 1 holds nothing
BATCHES = [[23, 0, 7, 7, 19, 0, 4], [17, 5, 5, 5], [], [1, 20, 7, 18, 2, 7, 7, 11, 0]]


def exchange(part: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
    """Row blocks of `part` to all ranks, theirs to me; gradients take the way back."""
    return functional.all_to_all_single(part, receive, send, dist.group.WORLD)


def look_up(mine: torch.Tensor, first: list[int], wanted: torch.Tensor) -> torch.Tensor:
    """The vectors of the items `wanted`, in their order, with gradients for their owners."""
    distinct, place = wanted.unique(return_inverse=True)  # sorted, so the owners are in order
    owner = torch.bucketize(distinct, torch.tensor(first[1:]), right=True)
    asked = torch.bincount(owner, minlength=dist.get_world_size())
    asked_of_me = torch.empty_like(asked)
    dist.all_to_all_single(asked_of_me, asked)
    send, receive = asked.tolist(), asked_of_me.tolist()
    numbers = exchange(distinct, receive, send) - first[dist.get_rank()]
    return exchange(mine[numbers], send, receive)[place]


def naive_gradient(mine: torch.Tensor, first: list[int], wanted: torch.Tensor) -> torch.Tensor:
    """Wrong: the collective of c10d fills a fresh tensor, and no gradient comes home."""
    distinct, place = wanted.unique(return_inverse=True)
    owner = torch.bucketize(distinct, torch.tensor(first[1:]), right=True)
    asked = torch.bincount(owner, minlength=dist.get_world_size())
    asked_of_me = torch.empty_like(asked)
    dist.all_to_all_single(asked_of_me, asked)
    numbers = distinct.new_empty(int(asked_of_me.sum()))
    dist.all_to_all_single(numbers, distinct, asked_of_me.tolist(), asked.tolist())
    rows = mine[numbers - first[dist.get_rank()]].contiguous()
    back = mine.new_empty(len(distinct), mine.shape[1])
    dist.all_to_all_single(back, rows, asked.tolist(), asked_of_me.tolist())
    return back[place] + 0 * mine.sum()  # so that backward runs at all


def naive_order(mine: torch.Tensor, first: list[int], wanted: torch.Tensor) -> torch.Tensor:
    """Wrong: the vectors come in the order of their owners, not in that of the batch."""
    return look_up(mine, first, wanted.sort().values)


def naive_repeats(mine: torch.Tensor, first: list[int], wanted: torch.Tensor) -> torch.Tensor:
    """Right values and gradients, but a row that stands three times in a batch travels thrice."""
    order = wanted.argsort(stable=True)
    owner = torch.bucketize(wanted[order], torch.tensor(first[1:]), right=True)
    asked = torch.bincount(owner, minlength=dist.get_world_size())
    asked_of_me = torch.empty_like(asked)
    dist.all_to_all_single(asked_of_me, asked)
    send, receive = asked.tolist(), asked_of_me.tolist()
    numbers = exchange(wanted[order], receive, send) - first[dist.get_rank()]
    return exchange(mine[numbers], send, receive)[order.argsort()]


class RowsSent(TorchDispatchMode):
    """Counts the vectors that this rank sends, itself included."""

    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket.__name__.startswith(("all_to_all_single", "alltoall_base")):
            vectors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            self.total += len(vectors[-1]) if vectors else 0
        return op(*args, **(kwargs or {}))


def try_all(first: list[int], batches: list[list[int]]) -> None:
    """In a rank: run every way on this rank's batch, and report what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    table = torch.randn(first[-1], 3, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor(batches[rank], dtype=torch.long)
    for way in (look_up, naive_gradient, naive_order, naive_repeats):
        mine = table[first[rank] : first[rank + 1]].clone().requires_grad_()
        with RowsSent() as counter:
            found = way(mine, first, wanted)
        factors = torch.arange(1.0, len(wanted) + 1)[:, None] * (rank + 1)  # no two are alike
        (found * factors).sum().backward()
        values = found.detach().tolist()
        report(way.__name__, values=values, grad=mine.grad.tolist(), sent=counter.total)
    dist.destroy_process_group()


@cache
def results() -> list[dict[str, dict]]:
    """For each rank: way -> what it reported."""
    run = run_ranks(try_all, 4, quiet=True, first=FIRST, batches=BATCHES)
    return [{entry["event"]: entry for entry in reports} for reports in run.reports]


def reference() -> tuple[list[torch.Tensor], torch.Tensor]:
    """What one process with the whole table finds: the vectors per batch, and the gradient."""
    table = torch.randn(FIRST[-1], 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = [table[torch.tensor(batch, dtype=torch.long)] for batch in BATCHES]
    for rank, vectors in enumerate(found):
        (vectors * torch.arange(1.0, len(vectors) + 1)[:, None] * (rank + 1)).sum().backward()
    return [vectors.detach() for vectors in found], table.grad


def check(way: Callable) -> None:
    """Raise AssertionError, with what is wrong, where `way` is no right look-up."""
    values, gradient = reference()
    for rank, entries in enumerate(results()):
        entry = entries[way.__name__]
        got = torch.tensor(entry["values"]).view(-1, 3)
        assert torch.equal(got, values[rank]), f"values on rank {rank}"
    for rank, entries in enumerate(results()):
        got = torch.tensor(entries[way.__name__]["grad"]).view(-1, 3)
        wanted = gradient[FIRST[rank] : FIRST[rank + 1]]
        assert torch.allclose(got, wanted), f"gradient on rank {rank}"
    answered = sum(entries[way.__name__]["sent"] for entries in results())
    assert answered == sum(len(set(batch)) for batch in BATCHES), "rows that travelled"


def test_the_look_up_has_the_values_and_gradients_of_the_whole_table():
    check(look_up)


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (naive_gradient, "gradient"),
        (naive_order, "values"),
        (naive_repeats, "rows that travelled"),
    ],
)
def test_the_check_catches(way: Callable, fault: str):
    with pytest.raises(AssertionError, match=fault):
        check(way)
