"""Transfer task for distributed/timeouts-and-hooks.

A job is slow, and no rank looks slow: all wait for each other. Who comes last?

Write the context manager `who_is_late(group)`. It yields a list. When its block is over, the list
holds one `(operation, rank, seconds)` for each collective of the block, in order: the rank that
came last, and how long the first one had waited for it. Right is: all ranks hold the same list;
what you exchange to make it is not in it; after the block, also after an error in it, no hook is
left; not one collective is added inside the block. The ranks are on one machine, with one clock.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from course.kit import report, run_ranks

HOOK = 4711
Late = list[tuple[str, int, float]]

# The solution.


def who_is_late(group: dist.ProcessGroup) -> Iterator[Late]:
    """The last rank at each collective of the block, and the seconds the first one waited."""
    came: list[tuple[str, float]] = []
    late: Late = []
    group.register_pre_hook(HOOK, lambda args: came.append((args.name.name, time.monotonic())))
    try:
        yield late
    finally:
        group.unregister_pre_hook(HOOK)  # before the exchange, which is not of the block
    of_rank: list = [None] * group.size()
    dist.all_gather_object(of_rank, came, group)
    for calls in zip(*of_rank, strict=True):
        times = [at for _, at in calls]
        late.append((calls[0][0], times.index(max(times)), max(times) - min(times)))


# Wrong solutions.


def naive_longest(group: dist.ProcessGroup) -> Iterator[Late]:
    """Blames the rank that spent the most time inside: that is the one that waited."""
    began: list[float] = []
    took: list[tuple[str, float]] = []
    late: Late = []
    group.register_pre_hook(HOOK, lambda args: began.append(time.monotonic()))
    original, waiting = dist.all_reduce, torch.ones(1)

    def timed(tensor: torch.Tensor = waiting) -> None:
        original(tensor)
        took.append(("ALLREDUCE", time.monotonic() - began[-1]))

    dist.all_reduce = timed
    try:
        yield late
    finally:
        dist.all_reduce = original
        group.unregister_pre_hook(HOOK)
    of_rank: list = [None] * group.size()
    dist.all_gather_object(of_rank, took, group)
    for calls in zip(*of_rank, strict=True):
        times = [seconds for _, seconds in calls]
        late.append((calls[0][0], times.index(max(times)), max(times) - min(times)))


def naive_left_on(group: dist.ProcessGroup) -> Iterator[Late]:
    """Leaves the hook on while it exchanges, and after an error for ever."""
    came: list[tuple[str, float]] = []
    late: Late = []
    group.register_pre_hook(HOOK, lambda args: came.append((args.name.name, time.monotonic())))
    yield late
    dist.barrier(group)
    of_rank: list = [None] * group.size()
    dist.all_gather_object(of_rank, came, group)
    group.unregister_pre_hook(HOOK)
    for calls in zip(*of_rank, strict=True):
        times = [at for _, at in calls]
        late.append((calls[0][0], times.index(max(times)), max(times) - min(times)))


# The check.


def managers() -> dict[str, Callable]:
    """All ways, by name. Ranks get the plain functions, so the decorator comes here."""
    make = contextlib.contextmanager
    return {way.__name__: make(way) for way in (who_is_late, naive_longest, naive_left_on)}


def job(way: str, nap: float) -> None:
    """Four sums; rank 1 is late at the second one, rank 2 at the fourth. Then an error."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    dist.all_reduce(torch.ones(1))  # connect, so that nobody is late for that
    with managers()[way](group) as late:
        for step in range(4):
            if (rank, step) in ((1, 1), (2, 3)):
                time.sleep(nap)
            dist.all_reduce(torch.ones(1))
    report("late", late=late)
    with contextlib.suppress(ZeroDivisionError), managers()[way](group):
        print(1 / 0)
    group.register_pre_hook(HOOK, lambda args: None)  # refused where one of the block is left
    report("clean")


def check(way: str) -> None:
    """The two late ranks are named, the list is that of the block and the same everywhere."""
    nap = 0.8
    run = run_ranks(job, 3, way=way, nap=nap, quiet=True, check=False)
    lists = [event["late"] for event in run.events("late").values()]
    assert len(lists) == 3 and lists[0] == lists[1] == lists[2], lists
    assert [name for name, *_ in lists[0]] == ["ALLREDUCE"] * 4, lists[0]
    for place, rank in ((1, 1), (3, 2)):
        assert lists[0][place][1] == rank and lists[0][place][2] > nap / 2, lists[0]
    assert len(run.events("clean")) == 3, "a hook is left after an error in the block"


def test_who_is_late() -> None:
    check("who_is_late")


@pytest.mark.parametrize("way", ["naive_longest", "naive_left_on"])
def test_wrong_ways_are_caught(way: str) -> None:
    with pytest.raises(AssertionError):
        check(way)
