"""Transfer task for distributed/flight-recorder.

Nothing hangs, but your job sends more than you can explain. The flight recorder is on anyway. Find
out which of **your** lines sends how much.

Write `traffic(dump)`. It gets one rank's dump and returns a list of `(bytes, function, line)`, most
bytes first: for each line of your code that made collectives, how many bytes it put into them, all
its calls together. Right is: each call counts once, whoever recorded it; the line is yours and not
PyTorch's; a type of eight bytes weighs twice as much as one of four; barriers do not count.
"""

import math
import os
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from course.kit import report, run_ranks

SIZES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}
Traffic = list[tuple[int, str, int]]

# The solution.


def mine(entry: dict[str, Any]) -> dict[str, Any]:
    """The innermost frame that is not PyTorch's own."""
    inside = f"{os.sep}torch{os.sep}"
    return next(frame for frame in entry["frames"] if inside not in frame["filename"])


def bytes_in(entry: dict[str, Any]) -> int:
    """What the call put in."""
    pairs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    return sum(math.prod(size) * SIZES.get(dtype, 1) for size, dtype in pairs)


def traffic(dump: dict[str, Any]) -> Traffic:
    """Bytes by line of the caller, most first; only the backend's own entries."""
    sums: Counter[tuple[str, int]] = Counter()
    for entry in dump["entries"]:
        if entry["profiling_name"].startswith("gloo:") and "barrier" not in entry["profiling_name"]:
            frame = mine(entry)
            sums[frame["name"], frame["line"]] += bytes_in(entry)
    return [(number, *where) for where, number in sums.most_common()]


# Wrong solutions.


def naive_all(dump: dict[str, Any]) -> Traffic:
    """Counts a call twice: the hook and Gloo both recorded it."""
    sums: Counter[tuple[str, int]] = Counter()
    for entry in dump["entries"]:
        if "barrier" not in entry["profiling_name"]:
            frame = mine(entry)
            sums[frame["name"], frame["line"]] += bytes_in(entry)
    return [(number, *where) for where, number in sums.most_common()]


def naive_innermost(dump: dict[str, Any]) -> Traffic:
    """Blames the innermost frame: a line of PyTorch."""
    sums: Counter[tuple[str, int]] = Counter()
    for entry in dump["entries"]:
        if entry["profiling_name"].startswith("gloo:"):
            frame = entry["frames"][0]
            sums[frame["name"], frame["line"]] += bytes_in(entry)
    return [(number, *where) for where, number in sums.most_common()]


def naive_elements(dump: dict[str, Any]) -> Traffic:
    """Takes every number for four bytes."""
    entries = [{**entry, "input_dtypes": ["Float"] * 9} for entry in dump["entries"]]
    return traffic({**dump, "entries": entries})


# The check.


def metrics(step: int) -> None:
    """Twice as many numbers as the gradients have bytes a quarter: doubles, one by one."""
    for value in range(4):
        dist.all_reduce(torch.full((100,), float(step + value), dtype=torch.float64))


def gradients() -> None:
    """The traffic that everybody expects."""
    dist.all_reduce(torch.ones(500))


def job(way: str) -> None:
    """Three steps with the recorder on, then the report of one way to count."""
    dist.init_process_group("gloo")
    hook = c10d.FlightRecorderHook.attach(dist.group.WORLD)
    for step in range(3):
        gradients()
        metrics(step)
        dist.barrier()
    dump = pickle.loads(c10d._dump_fr_trace())
    report("traffic", rows=ways()[way](dump), hooked=hook is not None)


def ways() -> dict[str, Any]:
    """All ways to count, by name."""
    return {way.__name__: way for way in (traffic, naive_all, naive_innermost, naive_elements)}


def check(way: str) -> None:
    """Both ranks must find the same two lines, with the right bytes."""
    for event in run_ranks(job, 2, way=way, quiet=True).events("traffic").values():
        found = [(number, name) for number, name, _ in event["rows"]]
        assert found == [(3 * 4 * 100 * 8, "metrics"), (3 * 500 * 4, "gradients")], found


def test_traffic() -> None:
    check("traffic")


@pytest.mark.parametrize("way", ["naive_all", "naive_innermost", "naive_elements"])
def test_wrong_ways_are_caught(way: str) -> None:
    with pytest.raises(AssertionError):
        check(way)
