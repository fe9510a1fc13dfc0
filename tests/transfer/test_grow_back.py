"""Transfer task for distributed/grow-back.

Your job counts the tokens of each language that it has trained on. Each rank counts for itself,
so the total is the sum over the ranks. `Tally` holds two parts: `settled`, the total at the last
change of the group, which all members hold alike, and `own`, what this rank has added since then.

Write `settle(tally, step)`, which all ranks call after a change of the group. A newcomer is at
step 0 with an empty tally, and its rank in the group can be any. Afterwards all ranks hold the
same `settled` with all that was counted, and an empty `own`. The function returns the furthest
step. Survivors can have counted different languages. A second call at once must change nothing.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch.distributed as dist

from course.kit import RankRun, report, run_ranks


class Tally:
    """Tokens by language: of all ranks up to the last change, and of this rank since then."""

    def __init__(self, settled: dict[str, int], own: dict[str, int]) -> None:
        self.settled, self.own = settled, own


def settle(tally: Tally, step: int) -> int:
    """Take the settled part of the furthest rank, and add what every rank has counted since."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [step, tally.settled, tally.own], weights_only=True)
    furthest, settled, _ = max(everybody, key=lambda entry: entry[0])
    total = Counter(settled)
    for _, _, own in everybody:
        total.update(own)
    tally.settled, tally.own = dict(total), {}
    return furthest


def naive_copy(tally: Tally, step: int) -> int:
    """Wrong: hands over like weights, so what the other survivors have counted is lost."""
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step, weights_only=True)
    state = [[tally.settled, tally.own]]
    dist.broadcast_object_list(state, group_src=steps.index(max(steps)), weights_only=True)
    total = Counter(state[0][0])
    total.update(state[0][1])
    tally.settled, tally.own = dict(total), {}
    return max(steps)


def naive_sum(tally: Tally, step: int) -> int:
    """Wrong: adds the settled part of each survivor, though they hold the same one."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [step, tally.settled, tally.own], weights_only=True)
    total: Counter[str] = Counter()
    for _, settled, own in everybody:
        total.update(settled)
        total.update(own)
    tally.settled, tally.own = dict(total), {}
    return max(step for step, _, _ in everybody)


def naive_first(tally: Tally, step: int) -> int:
    """Wrong: trusts rank 0, which can be the newcomer."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [step, tally.settled, tally.own], weights_only=True)
    total = Counter(everybody[0][1])
    for _, _, own in everybody:
        total.update(own)
    tally.settled, tally.own = dict(total), {}
    return everybody[0][0]


def try_all() -> None:
    """Every way of settling, with the newcomer at the first rank and at the last."""
    dist.init_process_group("gloo")
    ways = {"right": settle, "copy": naive_copy, "sum": naive_sum, "first": naive_first}
    for way, function in ways.items():
        for newcomer in (0, 2):
            report(f"{way} {newcomer}", **after_growth(function, newcomer))
    dist.barrier()


def after_growth(function: Callable[[Tally, int], int], newcomer: int) -> dict[str, list]:
    """Two survivors and a newcomer settle twice, count on, and settle once more."""
    rank = dist.get_rank()
    tally, step = Tally({}, {}), 0
    if rank != newcomer:
        behind = rank == (newcomer + 1) % 3
        own = {"de": 5} if behind else {"de": 7, "fi": 2}
        tally, step = Tally({"de": 100, "en": 40}, own), 9 if behind else 10
    steps = [function(tally, step), function(tally, 10)]
    grown = [tally.settled, tally.own]
    tally.own = {"pl": rank + 1}
    function(tally, 11)
    return {"steps": steps, "grown": grown, "later": [tally.settled, tally.own]}


def check(results: list[dict[str, list]]) -> None:
    """All ranks hold the whole count, at the growth and after more counting."""
    whole = {"de": 112, "en": 40, "fi": 2}
    assert len(results) == 3
    for result in results:
        assert result["grown"] == [whole, {}], "each token once"
        assert result["steps"] == [10, 10], "the step of the furthest"
        assert result["later"] == [{**whole, "pl": 6}, {}], "each token once, later too"


@pytest.fixture(scope="module")
def run() -> RankRun:
    return run_ranks(try_all, 3, quiet=True)


def test_all_tokens_are_counted_once(run: RankRun) -> None:
    for newcomer in (0, 2):
        check(list(run.events(f"right {newcomer}").values()))


def test_the_check_catches_the_wrong_ways(run: RankRun) -> None:
    for way in ("copy", "sum", "first"):
        with pytest.raises(AssertionError, match="each token once"):
            check(list(run.events(f"{way} 0").values()))
