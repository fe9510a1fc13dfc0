"""Transfer task for distributed/write-a-backend.

Your job hangs, or trains on garbage, since one rank sometimes calls another collective than the
others, or the same one with another size or type. Gloo does not tell which rank it was.

Write the backend `Checked` around Gloo, with `allreduce`, `broadcast`, `allgather` and `barrier`.
Before a collective moves a byte, the ranks compare what they are about to do: its name, the shapes
and types of the tensors, and the operation or the root. Where they disagree, **every** rank raises
a `RuntimeError` that says what each rank called. The group stays usable.

Right is: each kind of mistake raises on all ranks, a correct sum works after it, DDP trains on the
backend as on Gloo, and the store does not grow with the number of calls.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.nn.parallel import DistributedDataParallel

from course.kit import RankRun, report, run_ranks

# The solution.


class Checked(Backend):
    """Gloo, after all ranks have agreed on the call."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.store, self.step = store, 0

    def getBackendName(self) -> str:
        """Its name in error messages."""
        return "checked"

    def describe(self, name: str, tensors: list[torch.Tensor], detail: str) -> str:
        """What must be the same on all ranks."""
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
        return " ".join([name, *kinds, detail]).strip()

    def name_of(self, operation: dist.ReduceOp) -> str:
        """Its name; `str` of it is an address, which differs from rank to rank."""
        names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
        return next((n for n in names if operation == getattr(dist.ReduceOp, n)), "other")

    def agree(self, call: str) -> None:
        """Raise on every rank where the calls differ."""
        self.step += 1
        self.store.set(f"call {self.step} of {self.rank()}", call)
        calls = [
            self.store.get(f"call {self.step} of {rank}").decode() for rank in range(self.size())
        ]
        if self.step > 1:  # all are at this step, so nobody reads the one before any more
            self.store.delete_key(f"call {self.step - 1} of {self.rank()}")
        self.judge(calls)

    def judge(self, calls: list[str]) -> None:
        """Every rank sees the same list, so all raise or none does."""
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise RuntimeError(f"the ranks disagree: {listed}")

    def allreduce(self, tensors, options):
        """A sum, or another operation."""
        self.agree(self.describe("allreduce", tensors, self.name_of(options.reduceOp)))
        return self.gloo.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        """The tensor of the root, for all."""
        self.agree(self.describe("broadcast", tensors, f"root {options.rootRank}"))
        return self.gloo.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options):
        """The tensors of all, for all."""
        self.agree(self.describe("allgather", inputs, ""))
        return self.gloo.allgather(outputs, inputs, options)

    def barrier(self, options):
        """A meeting without data."""
        self.agree("barrier")
        return self.gloo.barrier(options)


# Wrong solutions.


class NaiveName(Checked):
    """Compares the name and the number of bytes."""

    def describe(self, name: str, tensors: list[torch.Tensor], detail: str) -> str:
        """Bytes tell nothing about the type, the shape or the operation."""
        return f"{name} {sum(t.numel() * t.element_size() for t in tensors)}"


class NaiveLoner(Checked):
    """Each rank compares itself with rank 0, and only who differs raises."""

    def judge(self, calls: list[str]) -> None:
        """Rank 0 goes on into Gloo, and waits there."""
        if calls[self.rank()] != calls[0]:
            raise RuntimeError(f"the ranks disagree: rank {self.rank()}: {calls[self.rank()]}")


# The check.


def mistake(kind: str, odd: bool) -> None:
    """One collective, that one rank calls in another way than the others."""
    if kind == "size":
        dist.all_reduce(torch.ones(3 if odd else 4))
    elif kind == "type":  # as many bytes
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))
    elif kind == "shape":  # as many elements
        dist.all_reduce(torch.ones(2, 3) if odd else torch.ones(3, 2))
    elif kind == "operation":
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif kind == "root":
        dist.broadcast(torch.ones(4), src=int(odd))
    elif odd:  # kind is "name"
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))


def make_backend(kind: str, *arguments: object) -> Backend:
    """The backend class of that name."""
    return {made.__name__: made for made in (Checked, NaiveName, NaiveLoner)}[kind](*arguments)


def start(kind: str, seconds: float) -> None:
    """A default group on this backend."""
    torch.set_num_threads(1)
    dist.Backend.register_backend(
        "checked", lambda *arguments: make_backend(kind, *arguments), devices=["cpu"]
    )
    dist.init_process_group("checked", timeout=timedelta(seconds=seconds))


def mistakes(kind: str, cases: list[str], seconds: float) -> None:
    """Make each mistake, and report what this rank saw."""
    start(kind, seconds)
    for case in cases:
        try:
            mistake(case, odd=dist.get_rank() == 1)
            report(case, error="none")
        except RuntimeError as error:
            report(case, error=str(error).splitlines()[0])
            if "disagree" not in str(error):
                return  # Gloo has given up, and the group with it
    total = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    report("total", value=total.tolist())


def train(kind: str) -> None:
    """Two steps of DDP on the backend, and many sums."""
    start(kind, seconds=30)
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 2))
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    store, keys = dist.distributed_c10d._get_default_store(), []
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        keys.append(store.num_keys())
    report("train", gradient=model.module.weight.grad[0, 0].item(), keys=[keys[1], keys[-1]])


CASES = {
    "name": ["allreduce float32[4]", "barrier"],
    "size": ["float32[4]", "float32[3]"],
    "type": ["float32[4]", "int32[4]"],
    "shape": ["float32[3, 2]", "float32[2, 3]"],
    "operation": ["SUM", "MAX"],
    "root": ["root 0", "root 1"],
}


def check_mistakes(kind: str, cases: list[str], seconds: float = 30) -> None:
    """All ranks must have seen the same message about each mistake."""
    asked = {"kind": kind, "cases": cases, "seconds": seconds}
    run: RankRun = run_ranks(mistakes, 3, **asked, quiet=True, check=False)
    for case in cases:
        errors = {rank: event["error"] for rank, event in run.events(case).items()}
        assert len(errors) == 3 and all("disagree" in e for e in errors.values()), (case, errors)
        assert len(set(errors.values())) == 1, f"{case}: one message for all, not {errors}"
        message = errors[0].lower()
        assert all(word.lower() in message for word in CASES[case]), (case, message)
    totals = [event["value"] for event in run.events("total").values()]
    assert totals == [[6.0] * 4] * 3, f"the group must stay usable: {totals}"


def test_every_mistake_raises_on_all_ranks() -> None:
    check_mistakes("Checked", list(CASES))


def test_ddp_trains_and_the_store_stays_small() -> None:
    run = run_ranks(train, 2, kind="Checked", quiet=True)
    for event in run.events("train").values():
        assert event["gradient"] == 1.5, "the mean of 1 and 2"
        first, last = event["keys"]
        assert abs(last - first) <= 2, f"{first} keys became {last}"  # a peer may be a step ahead


@pytest.mark.parametrize(("kind", "case"), [("NaiveName", "type"), ("NaiveLoner", "size")])
def test_the_check_catches(kind: str, case: str) -> None:
    with pytest.raises(AssertionError, match=case):
        check_mistakes(kind, [case], seconds=2)  # so long does a rank wait that was left alone
