"""Transfer task for distributed/nccl2.

A launcher gets a list of backends, the best one first, and must start each job on the first that
works on this machine. `dist.is_backend_available` says yes to backends that then die.

Write `choose(candidates)`. It lets two real ranks use each candidate for a sum of CPU tensors,
from `init_process_group` to `destroy_process_group` and the end of the process, and returns the
first candidate that comes through; where none does, a `RuntimeError` says how each one failed.

Right is: a backend is refused if its init or its sum raises, if the sum is wrong, and if it dies
while it is taken down, when all results are there. The launcher itself survives all of these.
"""

import functools
import os
import resource
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _create_work_from_future
from torch.futures import Future

from course.kit import RankRun, report, run_ranks

# What the machine offers besides the backends of torch: three of a house that makes chips.


class Base(Backend):
    """Holds Gloo; a chip's own library would be here."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout=None) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "house"

    def allreduce(self, tensors, options):
        return self.gloo.allreduce(tensors, options)


class NeedsChip(Base):
    """As the old NCCL backend: looks for the hardware when it is made."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout=None) -> None:
        raise RuntimeError("no chip found")


class MovesNothing(Base):
    """Says that all went well, and sums nothing."""

    def allreduce(self, tensors, options):
        future = Future()
        future.set_result(tensors)
        return _create_work_from_future(future)


class DiesLate(Base):
    """As nccl2 without a GPU: computes, and aborts while it is taken down."""

    def shutdown(self) -> None:
        os.kill(os.getpid(), signal.SIGABRT)


def register_house() -> None:
    """Tell this process their names."""
    for made in (NeedsChip, MovesNothing, DiesLate):
        dist.Backend.register_backend(made.__name__.lower(), made, devices=["cpu"])


# The solution.


def probe(name: str) -> None:
    """Use a backend in this process, step by step, to the end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # if it aborts, leave no core file
    register_house()
    dist.init_process_group(name)
    report("init")
    total = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    report("sum", value=total.tolist())
    dist.destroy_process_group()
    report("destroy")


@functools.cache
def tried(name: str) -> RankRun:
    """What two ranks saw of a backend. They are processes of their own, for they may die."""
    return run_ranks(probe, 2, name=name, check=False, quiet=True)


def verdict(run: RankRun) -> str:
    """Why a backend is refused; empty where it works."""
    for step in ("init", "sum", "destroy"):
        if len(run.events(step)) < 2:
            return f"ended with {run.exit_codes} before {step} was done"
    values = [event["value"] for event in run.events("sum").values()]
    if values != [[3.0] * 4] * 2:
        return f"its sum is wrong: {values}"
    return "" if run.exit_codes == [0, 0] else f"ended with {run.exit_codes}"


def choose(candidates: list[str], judge: Callable[[RankRun], str] = verdict) -> str:
    """The first backend that works here."""
    refused = {}
    for name in candidates:
        refused[name] = judge(tried(name))
        if not refused[name]:
            return name
    raise RuntimeError("; ".join(f"{name}: {why}" for name, why in refused.items()))


# Wrong solutions.


def ask(names: list[str]) -> None:
    """Which names are registered."""
    register_house()
    report("known", names=[name for name in names if dist.is_backend_available(name)])


def naive_by_name(candidates: list[str]) -> str:
    """Asks in a process of its own, but only for what is registered."""
    return run_ranks(ask, 1, names=candidates, quiet=True).events("known")[0]["names"][0]


def naive_first_step(run: RankRun) -> str:
    """Is content when the first collective returned."""
    return "" if len(run.events("sum")) == 2 else "no sum"


def naive_exit_code(run: RankRun) -> str:
    """Looks at how the processes ended, and not at the numbers."""
    return "" if run.exit_codes == [0, 0] else "failed"


# The check.


def check_choice(chooser: Callable[[list[str]], str]) -> None:
    """Each trap stands before Gloo, which works everywhere."""
    for trap in ("needschip", "nccl2", "movesnothing", "dieslate"):
        assert chooser([trap, "gloo"]) == "gloo", f"{trap} does not work here"
    assert chooser(["gloo", "dieslate"]) == "gloo", "the first that works"


def test_the_first_that_works_is_chosen() -> None:
    check_choice(choose)


def test_what_really_happened() -> None:
    """The traps are what they say, so that the check means something."""
    late = tried("dieslate")
    assert late.exit_codes == [-signal.SIGABRT] * 2
    assert len(late.events("sum")) == 2 and not late.events("destroy")
    assert tried("movesnothing").exit_codes == [0, 0]
    assert not tried("needschip").events("init")


def test_a_refusal_says_how_each_one_failed() -> None:
    with pytest.raises(RuntimeError) as refusal:
        choose(["needschip", "movesnothing", "dieslate"])
    first, second, third = str(refusal.value).split("; ")
    assert "before init" in first and "sum is wrong" in second and "before destroy" in third


def test_the_check_catches_the_name() -> None:
    with pytest.raises(AssertionError, match="needschip"):
        check_choice(naive_by_name)


@pytest.mark.parametrize(
    ("judge", "trap"), [(naive_first_step, "dieslate"), (naive_exit_code, "movesnothing")]
)
def test_the_check_catches(judge: Callable[[RankRun], str], trap: str) -> None:
    assert choose([trap, "gloo"], judge) == trap, "it does not see this one"
    with pytest.raises(AssertionError, match="does not work here"):
        check_choice(functools.partial(choose, judge=judge))
