# ---
# jupyter:
#   course:
#     title: Find the line that hangs a distributed job
#     summary: Record every collective of a job, dump the record during a hang, and read it.
#     minutes: 40
#     level: core
#     objectives:
#       - Attach the Flight Recorder to a process group of any backend, and keep it attached.
#       - Write a watch that dumps the record during a hang, before the evidence is gone.
#       - Find the rank and the line at fault with an analyzer of your own.
#       - Make torchfrtrace read the dumps of a Gloo job, and judge its verdict.
#       - Name the bugs that no recorder sees, and catch them another way.
#     prerequisites: []
#     job: {function: watched_loop, ranks: 3, arguments: {steps: 4, folder: "."}}
#     features:
#       flight-recorder-any-backend: runs
#       sec-flight-recorder-eval: runs
#       torchrun-log-prefix: inspect
#     keypoints:
#       - Dump during the hang. After the timeout Gloo marks the failed call as done.
#       - Keep the handle that attach returns, and attach to every group you want to see.
#       - Gloo's own entries say what hangs. The hook's entries say who belongs to which group.
#       - Compare the ranks call by call. The first number with a difference is the place to look.
#       - Two swapped calls of one shape look right to every recorder. Let the ranks agree on names.
#       - A dump is a pickle. Read one from elsewhere with an unpickler that builds no objects.
#     sources:
#       - title: PyTorch 2.14 release blog, Backend-Agnostic Flight Recorder
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #189363, FlightRecorderHook for any backend"
#         url: https://github.com/pytorch/pytorch/pull/189363
#         date: 2026-07-09
#       - title: "PR #152563, a Flight Recorder that is not tied to one vendor"
#         url: https://github.com/pytorch/pytorch/pull/152563
#         date: 2025-05-06
#       - title: "PR #180268, gloo on the list of names that the analyzer accepts"
#         url: https://github.com/pytorch/pytorch/pull/180268
#         date: 2026-04-13
#       - title: "PR #191490, rank expressions parsed without eval"
#         url: https://github.com/pytorch/pytorch/pull/191490
#       - title: "PR #185010, DebugMode logs as JSON"
#         url: https://github.com/pytorch/pytorch/pull/185010
#         date: 2026-05-23
#       - title: "PR #191265, the log prefix of torchrun"
#         url: https://github.com/pytorch/pytorch/pull/191265
#     moved_in_215: >-
#       Not compared with a 2.15 wheel. PR #192233, opened on 5 August 2026, describes a hook that
#       attaches itself to backends without a recorder, and a dump when a collective fails. It is
#       not in 2.14.1: there, nothing is attached until you do it.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import contextlib
import copy
import importlib
import inspect
import io
import json
import logging
import os
import pickle
import re
import signal
import tempfile
import threading
import time
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from string import Template
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.run import get_args_parser
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.kit import (
    BLUE,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_RED,
    PAPER,
    RED,
    expect_error,
    plot_style,
    program_of,
    report,
    run_ranks,
    show,
)

plot_style()
FR_PACKAGE = "torch.distributed.flight_recorder"
scratch = tempfile.TemporaryDirectory(prefix="recorder-")  # removed at the end of the lesson


# %% [markdown]
# A distributed job stops. No error, no output, every process waits for another one. Which rank is
# at fault, and at which line? The **Flight Recorder** answers that: a short memory in every process
# that keeps the last collectives, with their sizes, their numbers and the line that called them.
# In this lesson you hang a job, take the record while it hangs, and find the line.
#
# > [!NOTE]
# > The release text calls this feature **API Unstable**: names and behaviour may change in any
# > later release, without a deprecation. It is private too. `FlightRecorderHook` and the dump
# > functions live in `torch._C._distributed_c10d`, and most begin with an underscore.
#
# Some words first. A **rank** is one process of the job, and also its number. A **collective** is
# a call that all ranks must make together, such as `all_reduce`, which sums a tensor over all of
# them. A **process group** is the set of ranks that make such calls. A **backend** moves the data:
# **Gloo** over sockets between CPUs, NCCL between NVIDIA GPUs.

# %% [markdown]
# ## The problem: everybody waits
#
# Below is a small training loop. In each step the ranks sum a gradient. In each third step they
# evaluate on rows that are held out, and rank 0 tells the others whether to stop. One function has
# a bug. It is the kind that passes review.


# %%
def evaluate(rows: torch.Tensor) -> torch.Tensor:
    """The mean over the rows of all ranks."""
    if len(rows) == 0:
        return torch.zeros(())  # nothing to do on this rank
    total = torch.stack([rows.sum(), torch.tensor(float(len(rows)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def train_step(step: int) -> None:
    gradient = torch.full((4,), 0.1 * step)
    dist.all_reduce(gradient)
    if step % 3 == 0:
        held_out = torch.arange(8.0 - step)  # fewer rows each time
        evaluate(held_out[dist.get_rank() :: dist.get_world_size()])
        stop = torch.zeros(1)
        dist.broadcast(stop, src=0)
    time.sleep(0.1)  # stands for the work of a larger model


# %% [markdown]
# The loop runs without a recorder of yours first. A group gives up on a silent peer after its
# **timeout**. `dist.set_timeout`, new and public in 2.14, makes it short here.


# %%
def plain_loop(steps: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.set_timeout(timedelta(seconds=2))
    for step in range(1, steps + 1):
        train_step(step)
        print(f"step {step}")


plain_run = run_ranks(plain_loop, 3, steps=9, quiet=True, check=False, timeout=40)

# %%
steps_done = [text.count("step ") for text in plain_run.output]
last_lines = [text.strip().splitlines()[-1] for text in plain_run.output]
for rank, line in enumerate(last_lines):
    print(f"rank {rank}, {steps_done[rank]} of 9 steps: {line.rsplit('] ', 1)[-1][:70]}")
print("Gloo's own timeout, if you set none:", dist.constants.default_pg_timeout)
assert steps_done == [5, 5, 5] and 0 not in plain_run.exit_codes
assert not any("rank 2" in line.lower() for line in last_lines), "no message names the culprit"

# %% [markdown]
# All three ranks fail in step 6. Each message says that it waited, and none says for whom. The
# first evaluation passed, so the code looks tested. And you got the messages only because the
# timeout was two seconds. By default you wait as long as the last line says.
#
# > [!NOTE]
# > The exact messages can differ from run to run. The first rank to give up closes its sockets,
# > and then another one may report a closed connection in place of a timeout.

# %% [markdown] tags=["instructor"]
# Before you go on, let the room read `evaluate` for one minute and vote: which rank hangs the job?
#
# Common wrong answers: "rank 0, it broadcasts", and "all of them, the timeout is too short". Some
# find the early return at once. Ask them how they would find it in 40 000 lines on 512 ranks.
# Ten minutes to here.

# %% [markdown]
# ## The smallest thing that works
#
# You need one call to record, `FlightRecorderHook.attach(group)`, and one to read,
# `_dump_fr_trace()`. To see that it works with *any* backend, take one that has no recorder of its
# own: **fake**, which comes with PyTorch for tests. It pretends to be one rank of many, moves no
# data and returns at once. So every entry below is the hook's.

# %%
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
dist.all_reduce(torch.ones(3))
before = pickle.loads(c10d._dump_fr_trace())

recorder = c10d.FlightRecorderHook.attach(dist.group.WORLD)
dist.all_reduce(torch.ones(3))
dist.broadcast(torch.ones(2, 5, dtype=torch.float64), src=0)
dist.barrier()
dump = pickle.loads(c10d._dump_fr_trace())

print("entries before attach:", len(before["entries"]))
for entry in dump["entries"]:
    print(entry["collective_seq_id"], entry["profiling_name"], entry["input_sizes"])

# %% tags=["claim"] claim="text-flight-recorder-any"
names = [entry["profiling_name"] for entry in dump["entries"]]
assert not before["entries"], "this backend records nothing by itself"
assert names == ["c10d:allreduce", "c10d:broadcast", "c10d:barrier"]
assert dump["pg_config"]["0"]["ranks"] == "[0, 1, 2, 3, 4, 5, 6, 7]"
print("the group, as the hook wrote it down:", dump["pg_config"]["0"])


# %% [markdown]
# A dump is a pickled dict. `entries` has one dict per call, oldest first. `collective_seq_id` is
# the number of the call within its group. The hook counts from its `attach` on, so attach at the same
# call on all ranks, and you can line them up by it. `pg_config` says which ranks belong to which group.
#
# ### One entry, field by field


# %%
def call_site(entry: dict[str, Any]) -> dict[str, Any]:
    """The innermost frame that is not PyTorch's own: the line that made the call."""
    inside = f"{os.sep}torch{os.sep}"
    return next(frame for frame in entry["frames"] if inside not in frame["filename"])


entry = dump["entries"][1]
shown = ["record_id", "process_group", "collective_seq_id", "is_p2p", "profiling_name"]
shown += ["input_sizes", "input_dtypes", "time_created_ns", "timeout_ms", "state", "retired"]
for key in shown:
    print(f"{key:18} {entry[key]!r}")
print(f"{'called from':18} line {call_site(entry)['line']} in {call_site(entry)['name']}")
assert entry["input_sizes"] == [[2, 5]] and entry["input_dtypes"] == ["Double"]

# %% [markdown]
# | field | how to use it |
# |---|---|
# | `process_group`, `collective_seq_id` | the same pair on two ranks must be the same call |
# | `profiling_name`, `input_sizes` | what the call is. The part before the colon says who recorded it |
# | `time_created_ns` | when the rank made the call, by the clock of its machine |
# | `frames` | the Python stack, innermost frame first |
# | `retired` | `True` once the recorder thinks that the call is over |
#
# `state` stays `scheduled` on a CPU, for calls that ended too. Do not read anything into it.

# %% [markdown]
# ### Two ways to lose the record
#
# `attach` returns a handle. The hook lives as long as that handle. And it sees one group, not the
# groups that you make later.

# %%


def count_entries() -> int:
    """How many entries the recorder of this process holds. JSON is the quick form of a dump."""
    return len(json.loads(c10d._dump_fr_trace_json()).get("entries", []))


recorder.remove()
c10d.FlightRecorderHook.attach(dist.group.WORLD)  # the handle is dropped, so this does nothing
dist.all_reduce(torch.ones(3))
dropped = count_entries()

recorder = c10d.FlightRecorderHook.attach(dist.group.WORLD)
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(3), group=pair)
subgroup = count_entries()
print(
    f"entries: {len(names)} before, {dropped} after a dropped handle, {subgroup} after a subgroup"
)
assert dropped == subgroup == len(names), "neither call was recorded"

# %% [markdown]
# Neither raises an error. Keep the handle in a variable that lives as long as the job, and attach
# to each group.
#
# ### A memory with an end
#
# The recorder is a **ring buffer**: when it is full, a new entry takes the place of the oldest.
# So the record costs the same on day ten as in minute one.

# %%
for _ in range(2500):
    dist.all_reduce(torch.ones(3))
ring = json.loads(c10d._dump_fr_trace_json())["entries"]
print("calls: 2500, entries kept:", len(ring))
print("number of the oldest entry kept:", ring[0]["collective_seq_id"])
assert len(ring) == 2000 and ring[0]["collective_seq_id"] > 1
recorder.remove()
dist.destroy_process_group()

# %% [markdown]
# The environment variable `TORCH_FR_BUFFER_SIZE` sets the size before the start of a process, and
# `0` switches the recorder off. Two ranks may have lost different early entries. An analyzer must
# not take that for a missing call.


# %% [markdown]
# ## Record a real hang
#
# Back to the three ranks that wait for each other. Somebody must take the dump, and a rank that
# hangs inside a collective cannot. So let a thread do it: a timer that each finished step sets
# back. When no step ends for `patience` seconds, the timer fires.
#
# Three details make this work:
#
# - **Patience is shorter than the timeout.** You will see what a dump after the timeout is worth.
# - **Warm up.** The first dump with stacks is slow, because it prepares the reading of stacks.
#   Pay for that at the start. Something must be recorded before, hence the barrier.
# - **Grace.** After its dump a rank waits a moment before it ends. If it hung up at once, the calls
#   of slower ranks would fail before they have dumped.


# %%
def write_dump(folder: str) -> float:
    """Write the recorder of this rank to `folder`. Returns the seconds that took."""
    start = time.perf_counter()
    Path(folder, f"rank_{dist.get_rank()}").write_bytes(c10d._dump_fr_trace())
    return time.perf_counter() - start


class HangWatch:
    """Dump the recorder when no step ends for `patience` seconds, then end the process."""

    def __init__(self, folder: str, patience: float, grace: float = 1.0) -> None:
        self.folder, self.patience, self.grace = folder, patience, grace
        dist.barrier()
        report("warm-up", seconds=write_dump(folder))
        dist.barrier()  # the slowest rank is warm too
        self.timer = threading.Timer(self.patience, self.give_up)
        self.beat()

    def beat(self) -> None:
        """A step has ended: start to count anew."""
        self.timer.cancel()
        self.timer = threading.Timer(self.patience, self.give_up)
        self.timer.daemon = True
        self.timer.start()

    def give_up(self) -> None:
        report("dumped", seconds=write_dump(self.folder), wall_ns=time.time_ns())
        time.sleep(self.grace)
        os._exit(3)  # the main thread hangs in a collective: nothing gentler ends it


# %% [markdown]
# The loop gets three new lines. The hook is attached as well, though Gloo has a recorder of its
# own. You will soon see why you want both.


# %%
def watched_loop(steps: int, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    hook = c10d.FlightRecorderHook.attach(dist.group.WORLD)
    watch = HangWatch(folder, patience=1.5)
    for step in range(1, steps + 1):
        train_step(step)
        watch.beat()
    watch.timer.cancel()
    hook.remove()


hang_folder = Path(scratch.name, "hang")
hang_folder.mkdir()
source = program_of(watched_loop).splitlines()  # the program that run_ranks starts
hang_run = run_ranks(
    watched_loop, 3, steps=9, folder=str(hang_folder), quiet=True, check=False, timeout=50
)
print("exit codes:", hang_run.exit_codes)
for file in sorted(hang_folder.iterdir()):
    print(f"{file.name}: {file.stat().st_size} bytes")
assert hang_run.exit_codes == [3, 3, 3], "every rank dumped, then ended"

# %% [markdown]
# The group's timeout was a minute, and nobody had to wait for it. What did the dumps cost?

# %%
first = {rank: event["seconds"] for rank, event in hang_run.events("warm-up").items()}
later = {rank: event["seconds"] for rank, event in hang_run.events("dumped").items()}
for rank in first:
    print(f"rank {rank}: first dump {first[rank]:.2f} s, during the hang {later[rank]:.4f} s")
assert min(first.values()) > 5 * min(later.values())

# %% [markdown]
# ## Read the dumps
#
# ### Without running code from them
#
# A dump is a pickle, and a pickle can run code as it is read. An honest dump holds only dicts,
# lists, tuples, text and numbers. So read dumps with an unpickler that refuses to look up any class
# or function.


# %%
class PlainUnpickler(pickle.Unpickler):
    """Reads plain data only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"this dump wants to call {module}.{name}")


def read_dumps(folder: Path) -> dict[int, dict[str, Any]]:
    """The dump of each rank, by rank number."""
    return {
        int(file.name.removeprefix("rank_")): PlainUnpickler(io.BytesIO(file.read_bytes())).load()
        for file in sorted(folder.iterdir())
    }


hang = read_dumps(hang_folder)
for entry in hang[0]["entries"][-4:]:
    print(f"{entry['collective_seq_id']:3} {entry['profiling_name']:16} retired {entry['retired']}")

# %% [markdown]
# ### Two recorders in one ring
#
# Each call stands there twice. `gloo:` entries come from the backend, which records by itself,
# without a hook. `c10d:` entries come from the hook. Look at the last two: both are the call that
# hangs.

# %% tags=["claim"] claim="article-flight-recorder"
native = [e for e in hang[0]["entries"] if e["profiling_name"].startswith("gloo:")]
hooked = [e for e in hang[0]["entries"] if e["profiling_name"].startswith("c10d:")]
assert len(native) == len(hooked), "Gloo records without the hook, one entry a call"
assert not native[-1]["retired"], "the truth: this call is not over"
assert hooked[-1]["retired"], "the hook says that it is over"
print("calls that Gloo's own entries show as open:", sum(not e["retired"] for e in native))
print("calls that the hook's entries show as open:", sum(not e["retired"] for e in hooked))

# %% [markdown]
# The hook retires an entry when the call is *handed to* the backend. It cannot know more: it stands
# before the backend, not in it. So ask `gloo:` entries what is still open.
#
# And what is the hook good for, on Gloo? It knows the groups. Gloo notes its group under an empty
# name, and the entries call it `'0'`.

# %%
print("the group's name in the entries:", native[-1]["process_group"])
for name, group in hang[0]["pg_config"].items():
    print(f"pg_config[{name!r}] = {group}")
assert "" in hang[0]["pg_config"], "written by Gloo"
assert hang[0]["pg_config"]["0"]["ranks"] == "[0, 1, 2]", "written by the hook"

# %% [markdown]
# With several groups it gets worse: all of Gloo's groups share the one empty name, and the last one
# wins. Attach the hook to each group, and `pg_config` has them all by name.
#
# ### Your own analyzer
#
# The idea fits in a sentence: line the ranks up by the number of the call, and stop at the first
# number where they differ, or where a call is still open. Here it is.


# %%
def numbered(dump: dict[str, Any], group: str = "0") -> dict[int, dict[str, Any]]:
    """Gloo's own entries of a group, "0" is the default group, by the number of the call."""
    return {
        entry["collective_seq_id"]: entry
        for entry in dump["entries"]
        if entry["profiling_name"].startswith("gloo:")
        and entry["process_group"][0] == group
        and not entry["is_p2p"]
    }


def what(entry: dict[str, Any] | None) -> str:
    """The call in short, such as 'all_reduce [[4]]'."""
    if entry is None:
        return "no call"
    return f"{entry['profiling_name'].split(':')[1]} {entry['input_sizes']}"


# %%
def first_trouble(
    dumps: dict[int, dict[str, Any]], group: str = "0"
) -> tuple[int, dict[int, Any]] | None:
    """The first call that differs between ranks or is not over: its number, rank -> entry."""
    calls = {rank: numbered(dump, group) for rank, dump in dumps.items()}
    # a ring may have lost early calls of a rank, and a rank may not have made any
    start = max(min(of_rank, default=1) for of_rank in calls.values())
    end = max(max(of_rank, default=0) for of_rank in calls.values())
    for number in range(start, end + 1):
        entries = {rank: of_rank.get(number) for rank, of_rank in calls.items()}
        differ = len({what(entry) for entry in entries.values()}) > 1
        if differ or any(entry and not entry["retired"] for entry in entries.values()):
            return number, entries
    return None


# %% [markdown]
# The frames name the line. The file that `run_ranks` wrote for the ranks is gone by now, so the cell
# looks the line up in `source`, the same text. In a job of yours, the file is there.

# %%
number, entries = first_trouble(hang)
print(f"call number {number}:")
for rank, entry in entries.items():
    site = call_site(entry)
    print(f"rank {rank}: {what(entry):18} line {site['line']} in {site['name']}()")
    print(f"        {source[site['line'] - 1].strip()}")
assert {rank: what(entry) for rank, entry in entries.items()} == {
    0: "all_reduce [[2]]",
    1: "all_reduce [[2]]",
    2: "broadcast [[1]]",
}
assert [call_site(entry)["name"] for entry in entries.values()].count("evaluate") == 2

# %% [markdown]
# There it is. Ranks 0 and 1 stand in `evaluate`. Rank 2 is already past it, at the broadcast of the
# stop flag. It left `evaluate` without the `all_reduce`: the early return. In step 6 only two rows
# were left, and rank 2 had none of them.
#
# Note the shape of the evidence. The rank at fault *did* call something, namely the collective
# that comes next in its program. Only a rank that never reaches another collective shows `no call`.
#
# ### Look at it


# %%
# how to draw a call: the marker, its colour, and how far below the middle of its rank
LOOKS = {
    "all_reduce": ("o", BLUE, -0.14),
    "broadcast": ("^", ORANGE, 0.14),
}


def draw_over_time(axis: plt.Axes, dumps: dict[int, Any], end_ns: int, numbers: range) -> None:
    """A mark for each of these calls, and a bar from each open call to the moment of the dump."""
    calls = {rank: numbered(dump) for rank, dump in dumps.items()}
    zero = min(of_rank[numbers[0]]["time_created_ns"] for of_rank in calls.values())
    for rank, number in [(rank, number) for rank in calls for number in numbers]:
        entry = calls[rank][number]
        at = (entry["time_created_ns"] - zero) / 1e9
        marker, colour, shift = LOOKS[what(entry).split()[0]]
        axis.plot(at, rank + shift, marker, color=colour, markersize=8, zorder=3)
        if not entry["retired"]:
            looks = {"color": PALE_RED, "edgecolor": INK, "hatch": "//"}
            axis.barh(rank, (end_ns - zero) / 1e9 - at, left=at, height=0.62, **looks)
        if what(entry) != what(calls[0][number]):  # here the others called something else
            marker, _, shift = LOOKS[what(calls[0][number]).split()[0]]
            hollow = {"markerfacecolor": PAPER, "markeredgecolor": RED, "markersize": 10}
            axis.plot(at, rank + shift, marker, zorder=3, markeredgewidth=2, **hollow)
    axis.set_yticks(list(calls), [f"rank {rank}" for rank in calls])
    axis.set_ylim(len(calls) - 0.5, -0.5)
    axis.set_xlabel("seconds since the first step")


# %% [markdown]
# The second picture lines up the same calls by their number.


# %%
def draw_by_number(axis: plt.Axes, dumps: dict[int, Any], trouble: int) -> None:
    """A table: ranks down, numbers across, a hatched cell where a rank is in the minority."""
    calls = {rank: numbered(dump) for rank, dump in dumps.items()}
    short = {"barrier": "bar", "all_reduce": "sum", "broadcast": "bcast"}
    for rank, of_rank in calls.items():
        for number, entry in of_rank.items():
            same = Counter(what(calls[other].get(number)) for other in calls)
            odd = same[what(entry)] <= len(calls) // 2
            face, hatch = (PALE_RED, "//") if odd else (PALE_BLUE, "")
            box = {"facecolor": face, "hatch": hatch, "edgecolor": INK}
            axis.add_patch(plt.Rectangle((number - 0.5, rank - 0.4), 1, 0.8, **box))
            label = short[what(entry).split()[0]]
            plate = {"facecolor": PAPER, "edgecolor": "none", "pad": 1} if odd else None
            axis.text(number, rank, label, ha="center", va="center", fontsize=9, bbox=plate)
    axis.set_xlim(0.4, trouble + 0.6)
    axis.set_ylim(len(calls) - 0.4, -0.6)
    axis.set_xticks(range(1, trouble + 1))
    axis.set_yticks(list(calls), [f"rank {rank}" for rank in calls])
    axis.set_xlabel("number of the call in its group")


# %% tags=["hide-input"]
fig, (over_time, by_number) = plt.subplots(2, 1, figsize=(7.5, 5.2), layout="constrained")
dumped_at = min(event["wall_ns"] for event in hang_run.events("dumped").values())
draw_over_time(over_time, hang, dumped_at, range(3, number + 1))  # 1 and 2 are the barriers
draw_by_number(by_number, hang, number)
for kind, (marker, colour, _) in LOOKS.items():
    over_time.plot([], [], marker, color=colour, markersize=8, label=kind)
hollow = {"markerfacecolor": PAPER, "markeredgecolor": RED, "markeredgewidth": 2}
over_time.plot(
    [], [], "o", markersize=10, linestyle="none", label="all_reduce not called", **hollow
)
over_time.fill([], [], facecolor=PALE_RED, hatch="//", edgecolor=INK, label="open until the dump")
over_time.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
fig_alt = (
    "Two pictures of three ranks. Above, marks for each collective over time: all ranks keep "
    "pace, then three bars show calls that never end, and a hollow mark on rank 2 stands for the "
    "sum that it did not call. Below, the calls lined up by number: the last column holds sum, sum and bcast."
)
show(fig, alt=fig_alt)

# %% [markdown]
# Over time, above, all three bars look alike: three ranks wait. By number, below, one cell differs.
# That is why an analyzer goes by number. Clocks of two machines differ, and a slow rank is not
# a wrong rank.

# %% [markdown]
# ### Several groups
#
# Four ranks in a square: a group for each row and each column, as in tensor parallelism. Rank 3 leaves
# out one call in its column.


# %%
def square_job(folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, lines = dist.get_rank(), [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [dist.new_group(line) for line in lines]  # each rank makes all of them
    row, column = [groups[i] for i, line in enumerate(lines) if rank in line]
    hooks = [c10d.FlightRecorderHook.attach(g) for g in (dist.group.WORLD, row, column)]
    HangWatch(folder, patience=1.5)
    dist.all_reduce(torch.ones(4), group=row)
    if rank != 3:
        dist.all_reduce(torch.ones(2), group=column)
    dist.all_reduce(torch.ones(1))
    print(len(hooks), "hooks, never reached")


square_folder = Path(scratch.name, "square")
square_folder.mkdir()
run_ranks(square_job, 4, folder=str(square_folder), quiet=True, check=False, timeout=50)
square = read_dumps(square_folder)
members = {name: pg["ranks"] for dump in square.values() for name, pg in dump["pg_config"].items()}
found = {}
for name in filter(None, sorted(members)):  # not Gloo's, which has no name
    trouble = first_trouble({rank: square[rank] for rank in json.loads(members[name])}, name)
    if trouble:
        found[name] = {rank: what(entry) for rank, entry in trouble[1].items()}
        print(f"group {name}, call {trouble[0]}: {found[name]}")
assert list(found) == ["0", "4"] and found["0"][1] == found["4"][3] == "no call"

# %% [markdown]
# One bug, two troubles. In the default group rank 1 is missing, but it is innocent: it waits in
# group 4. There rank 3 is missing, and what does that one do? It waits in the default group, for a
# *later* call. So run the analyzer once for each group, and follow who is missing to where they wait.
# The one that is ahead of its peers has left something out.

# %% [markdown]
# ## Break it
#
# Two more bugs. For the first the recorder helps in an unexpected way. For the second no recorder
# helps at all. One program holds both, and you run it twice.
#
# ### Bug one: a wrong size
#
# One rank's tensor is longer than the others'. Gloo notices only when too many bytes arrive.


# %%
def wrong_size() -> None:
    size = 8 if dist.get_rank() == 2 else 6
    dist.all_reduce(torch.ones(size))


# %% [markdown]
# ### Bug two: a swapped order
#
# Two metrics of the same shape, and one rank sums them in another order. That happens when you loop
# over a `set` of names: Python's hashes of text differ between processes, and so does the order.
# Below it is planted, so that it happens each time.


# %%
METRICS = {"loss": 1.0, "accuracy": 100.0}  # the same on each of three ranks


def sum_metrics(reduce: Any) -> dict[str, float]:
    """The sum of each metric over all ranks. `reduce(name, tensor)` does one of them."""
    names = list(METRICS) if dist.get_rank() != 2 else list(METRICS)[::-1]
    sums = {}
    for name in names:
        sums[name] = torch.tensor([METRICS[name]])
        reduce(name, sums[name])
    return {name: sums[name].item() for name in METRICS}


def reduce_plain(name: str, tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


# %% [markdown]
# Against that you can let the ranks agree on the *name* first. Each turns the name into a number
# $n$. One `all_reduce` with the minimum over $(n, -n)$ gives $(\min, -\max)$ on all ranks, and if
# the two are the same number, all meant the same.


# %%
def reduce_named(name: str, tensor: torch.Tensor) -> None:
    """`all_reduce`, once all ranks agree that they mean the same tensor."""
    tag = zlib.crc32(name.encode())  # not hash(): that differs between processes
    bounds = torch.tensor([tag, -tag])
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
    if bounds[0] != -bounds[1]:
        raise RuntimeError(f"the ranks do not agree on a name, here it is {name!r}")
    dist.all_reduce(tensor)


# %% [markdown]
# The program sums the metrics, then sums them with names, then makes the call with the wrong size.
# It dumps after the first and after the last. No hook here: these dumps are Gloo's alone. A thread of
# Gloo marks a call as over a moment *after* its end, so `settle` waits for that.


# %%
def settle(seconds: float = 5.0) -> None:
    """Wait until Gloo's own thread has marked the last call as over: a moment after its end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        entries = pickle.loads(c10d._dump_fr_trace())["entries"]
        if all(entry["retired"] for entry in entries):
            return
        time.sleep(0.01)


def two_bugs(folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    report("plain", **sum_metrics(reduce_plain))
    settle()
    report("recorded", entries=count_entries())
    if folder:
        write_dump(f"{folder}/swapped")
    for event, attempt in [("named", lambda: sum_metrics(reduce_named)), ("size", wrong_size)]:
        try:
            attempt()
        except RuntimeError as error:
            report(event, reason=str(error))
    if folder:
        settle()
        write_dump(f"{folder}/size")
    else:
        dist.barrier()  # all have their errors before the first leaves


# %%
for bug in ("swapped", "size"):
    Path(scratch.name, bug).mkdir()
bug_run = run_ranks(
    two_bugs,
    3,
    folder=scratch.name,
    env={"PYTHONFAULTHANDLER": "1"},  # a process that aborts prints its Python stack
    quiet=True,
    check=False,
    timeout=50,
)
print("exit codes:", bug_run.exit_codes)
print("rank -> dumped after the wrong size:", sorted(read_dumps(Path(scratch.name, "size"))))

# %% [markdown]
# ### The wrong size: one dies, and it is not the one at fault

# %%
died = bug_run.exit_codes.index(-signal.SIGABRT)
stack = [line for line in bug_run.output[died].splitlines() if " in wrong_size" in line]
print("killed by SIGABRT: rank", died)
print("last words:", bug_run.output[died].split("Received")[1].splitlines()[0])
print("its stack:", stack[0].split(",")[-1].strip())
after = first_trouble(read_dumps(Path(scratch.name, "size")))
for rank, entry in after[1].items():
    print(f"rank {rank}: {what(entry)}, retired {entry['retired']}")
assert died != 2, "rank 2 is at fault, another one dies of it"
assert all(entry["retired"] for entry in after[1].values()), "failed calls, marked as over"

# %% [markdown]
# Gloo aborts the process that *received* too much. No `except` catches that, so this rank leaves no
# dump. `PYTHONFAULTHANDLER=1` at least makes it print where it was. The others get an error, and
# their dumps tell the sizes apart: rank 2 brought eight numbers.
#
# Now look at `retired` in these dumps. The calls have *failed*, and stand there as over. A timeout
# leaves the same record. Your analyzer still finds a difference between ranks, but a call that all
# ranks made and that failed looks like a good one. That is why the watch dumps *during* the hang.
#
# ### The swapped order: no error, wrong numbers

# %%
right = {name: 3 * value for name, value in METRICS.items()}
for rank, sums in bug_run.events("plain").items():
    print(f"rank {rank}: loss {sums['loss']:g}, accuracy {sums['accuracy']:g}, right is {right}")
    assert {name: sums[name] for name in METRICS} != right
swapped = read_dumps(Path(scratch.name, "swapped"))
print("the analyzer says:", first_trouble(swapped))
assert first_trouble(swapped) is None

# %% [markdown]
# Nobody got the right sums, nobody got an error, and the analyzer sees two healthy calls. It cannot
# do better: number, kind, shape and even the line are the same on all ranks. Now the names.

# %%
for rank, event in bug_run.events("named").items():
    print(f"rank {rank}: {event['reason']}")
assert len(bug_run.events("named")) == 3, "every rank raised, before a wrong sum was made"

# %% [markdown]
# Each rank raises, and says what it meant. The price is one small collective for each real one.
# Use it while you hunt a bug, or in the first step only.
#
# ### What DETAIL sees
#
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes every group compare the calls of all ranks before it runs
# them. Run the same program with it.

# %%
detail_env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
detail_run = run_ranks(two_bugs, 3, folder="", env=detail_env, quiet=True, timeout=50)
reasons = {rank: event["reason"] for rank, event in detail_run.events("size").items()}
for rank, reason in reasons.items():
    shapes = [part.split("]")[0] for part in reason.split("TensorShape=[")[1:]]
    print(f"rank {rank}: {reason.split(' on ranks')[0]}, shapes {shapes}")
    assert set(shapes) == {"6", "8"}
assert len(reasons) == 3 and detail_run.exit_codes == [0, 0, 0], "nobody had to die"
wrong = detail_run.events("plain")[0]["loss"]
print(f"the swapped order: loss {wrong:g} on rank 0, as wrong as before, and no error")
assert wrong == bug_run.events("plain")[0]["loss"] != right["loss"]

# %% [markdown]
# The wrong size is now a clean error on every rank, with both shapes in it. The swapped order is
# as silent as before. What does DETAIL cost? Let the recorder count.

# %%
entries_off = bug_run.events("recorded")[1]["entries"]
entries_detail = detail_run.events("recorded")[1]["entries"]
print(f"entries for {len(METRICS)} calls: {entries_off} without DETAIL, {entries_detail} with it")
assert entries_off == len(METRICS) and entries_detail == 3 * len(METRICS)

# %% [markdown]
# Two more collectives for each of yours. They stand in the ring too, under numbers of their own. So
# take dumps without DETAIL, or the numbers of two counters mix.
#
# | bug | you see | recorder | DETAIL | names |
# |---|---|---|---|---|
# | a call left out | a hang | finds it | error at once | no help |
# | wrong size | an innocent rank aborts | finds it in the other dumps | error at once | no help |
# | two calls of one shape swapped | wrong numbers | sees nothing | sees nothing | error at once |

# %% [markdown] tags=["instructor"]
# Before the cell that prints the sums, ask: what does rank 0 get for `loss`? Let them add it up on
# paper: its own loss, rank 1's loss, rank 2's accuracy.
#
# Common wrong answer: "DETAIL catches it, it compares everything". It compares everything that a
# call carries, and a call does not carry the name of your variable. Fifteen minutes for this part.

# %% [markdown]
# ## The analyzer that ships: torchfrtrace
#
# PyTorch installs a command, `torchfrtrace FOLDER`, which reads a folder of dumps that are named
# like yours. The next cell calls the command's own `main`, so that no new Python has to start, and
# gives back what it prints.


# %%
def torchfrtrace(folder: Path, *options: str) -> str:
    """What the command of that name prints for `folder`."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):  # its logger keeps the stderr of the first import
        from torch.distributed.flight_recorder.fr_trace import main
    logging.getLogger("Flight Recorder").handlers = [logging.StreamHandler(printed)]
    main([str(folder), *options])
    return printed.getvalue()


# %% [markdown]
# First the dumps of the hang as they are, then dumps of Gloo alone.

# %% tags=["raises"]
with expect_error(AssertionError, match="c10d not in"):
    torchfrtrace(hang_folder)

# %% tags=["raises"]
with expect_error(KeyError, match="'0'"):
    torchfrtrace(Path(scratch.name, "swapped"))

# %% [markdown]
# Both fail in 2.14.1. The reasons are the two that you met above:
#
# - `AssertionError`: the analyzer has a list of backends. `gloo` is on it, and `c10d` is not.
# - `KeyError`: the entries belong to group `'0'`, and Gloo wrote the group down as `''`.
#
# So repair the dumps. Drop the hook's entries, drop the group without a name, and keep the groups
# that the hook wrote down. Where no hook was attached, you have to name the groups yourself.


# %%
def repair(dump: dict[str, Any], groups: dict[str, Any] | None = None) -> dict[str, Any]:
    """A dump of a Gloo job in the form that torchfrtrace reads."""
    entries = [e for e in dump["entries"] if e["profiling_name"].startswith("gloo:")]
    named = {name: group for name, group in dump["pg_config"].items() if name}
    return {**dump, "entries": entries, "pg_config": named or groups}


def write_dumps(name: str, dumps: dict[int, dict[str, Any]]) -> Path:
    """Write the dumps as files to a new folder `name`."""
    folder = Path(scratch.name, name)
    folder.mkdir()
    for rank, dump in dumps.items():
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


# %% tags=["claim"] claim="flight-recorder-cli"
repaired = {rank: repair(dump) for rank, dump in hang.items()}
verdict = torchfrtrace(write_dumps("repaired", repaired))
named = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", verdict)}
print(verdict.splitlines()[0])
print("expected:", re.search(r"Expected collective type: '(\w+)'", verdict)[1])
print("culprits, it says:", named)
assert "COLLECTIVE_TYPE_MISMATCH" in verdict and f"number: {number} has" in verdict
assert named in ({2}, {0, 1}), "those who differ from the rank whose file it read first"

# %% [markdown]
# The number of the call and the kind of error are right, and that is most of the work. Be careful
# with the word *culprit*. The command takes the rank whose file it read **first** as the reference,
# and names all who differ from it. Which file is first is up to the file system: the source calls
# `os.walk`, and sorts nothing. So it may name the whole job but one. Read it as "these two
# parties disagree", and let the majority and the line decide, as your analyzer did.
#
# And the two bugs of the last section?

# %%
world = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
swapped_folder = write_dumps("repaired-swapped", {r: repair(d, world) for r, d in swapped.items()})
print("swapped order:", torchfrtrace(swapped_folder).strip() or "no complaint")
assert "Culprit" not in torchfrtrace(swapped_folder)

# %% [markdown]
# As expected, it sees nothing either.
#
# ### Dumps of strangers
#
# The analyzer takes the list of ranks from the dump, where it is a piece of text. Until 2.13 it gave
# that text to Python's `eval`, so a dump could run code. Since 2.14 it reads literals only.

# %%
evil = {0: {"name": "0", "desc": "default_pg", "ranks": "[print('code from the dump')]"}}
strange = {rank: {**dump, "pg_config": {"0": evil[0]}} for rank, dump in repaired.items()}
with expect_error(ValueError, match="malformed node"):
    torchfrtrace(write_dumps("strange", strange))

# %% [markdown]
# Nothing was printed by the dump. But the command still reads files with plain `pickle.load`, and a
# pickle needs no `eval` to run code. Use it on dumps of your own jobs only.

# %%
loader = inspect.getsource(importlib.import_module(f"{FR_PACKAGE}.components.loader"))
builder = inspect.getsource(importlib.import_module(f"{FR_PACKAGE}.components.builder"))
print(
    "lines that unpickle:", [line.strip() for line in loader.splitlines() if "pickle.load" in line]
)
print("lines that eval:", [line.strip() for line in builder.splitlines() if " eval(" in line])
assert "pickle.load" in loader and " eval(" not in builder and "ast.literal_eval" in builder


# %% [markdown]
# ## Which machine said that?
#
# A dump names ranks. Your logs should, too. torchrun puts `[default3]:` before each line, where 3 is
# the number of the process on *its* machine. Since 2.14 you choose that text:
#
# ```bash
# torchrun --nnodes=4 --nproc-per-node=8 --tee 3 \
#   --log-line-prefix-template '${hostname}:${rank}: ' train.py
# ```
#
# Quote it with single quotes, or the shell puts its own variables in. Which names are there? The
# parser of torchrun knows.

# %%
actions = {action.dest: action for action in get_args_parser()._actions}
explanation = actions["log_line_prefix_template"].help
macros = re.findall(r"\$\{(\w+)\}", explanation.split("macros: ")[1].split(". ")[0])
print("names for the template:", macros)
print(
    "example:", Template("${hostname}:${rank}: ").substitute(hostname="node7", rank=3) + "step 12"
)
assert {"rank", "hostname"} <= set(macros)


# %% [markdown]
# ## On real hardware
#
# Everything above ran on a CPU, with Gloo. NCCL has a recorder of its own, and its group dumps when
# the watchdog sees a timeout, if you ask for it. The documentation names these variables; none was
# tried for this page.
#
# | variable | does |
# |---|---|
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1` | dump when a collective times out |
# | `TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/path/rank_` | where, with the rank as ending |
# | `TORCH_FR_BUFFER_SIZE=20000` | how many calls to keep |
#
# On a GPU `state` does move from `scheduled` to `started` and `completed`, as the recorder can ask
# the device. Clocks of two machines differ, so line up by number there, too.


# %%
def record_on_gpus() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    hook = c10d.FlightRecorderHook.attach(dist.group.WORLD)
    dist.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize()
    print([entry["profiling_name"] for entry in pickle.loads(c10d._dump_fr_trace())["entries"]])
    hook.remove()
    dist.destroy_process_group()


# %% tags=["hardware"] hardware="cuda"
if torch.cuda.device_count() < 2:
    print("skipped: NCCL needs one CUDA GPU per rank, two in all, and this machine has fewer")
else:
    run_ranks(record_on_gpus, 2)

# %% [markdown]
# ## Your turn
#
# The exercises use the dumps that you have: `hang`, `swapped`, and `sized`, where one file is
# missing.

# %%
sized = read_dumps(Path(scratch.name, "size"))
print("dumps:", {"hang": sorted(hang), "swapped": sorted(swapped), "sized": sorted(sized)})

# %% [markdown]
# ### Exercise: who is behind?
#
# The first question about a hang is not what, but who: which ranks have made the fewest calls, open ones
# included? Write `behind(dumps)`. It returns these ranks only, ascending. If all ranks have made the same number, nobody
# is behind, and the list is empty.


# %% tags=["exercise"] exercise="who-is-behind" difficulty=1 minutes=5
def behind(dumps: dict[int, dict[str, Any]]) -> list[int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `numbered(dump)` gives the calls of a rank by number. The ring may have dropped early calls, so the
# **highest** number counts, not the length.


# %% tags=["solution"]
def behind(dumps: dict[int, dict[str, Any]]) -> list[int]:
    last = {rank: max(numbered(dump)) for rank, dump in dumps.items()}
    if len(set(last.values())) == 1:
        return []
    return sorted(rank for rank, number in last.items() if number == min(last.values()))


# %% tags=["check"]
def keep(dump: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The same dump with the calls from number `first` to `last` only."""
    kept = [e for e in dump["entries"] if first <= e["collective_seq_id"] <= last]
    return {**dump, "entries": kept}


assert behind(hang) == [], "here all made the same number of calls"
stuck = {**hang, 1: keep(hang[1], 1, 8)}
assert behind(stuck) == [1]
assert behind({**stuck, 2: keep(hang[2], 1, 8)}) == [1, 2]
assert behind({**stuck, 0: keep(hang[0], 7, 99)}) == [1], (
    "a ring that lost early calls is not behind"
)
assert behind({**stuck, 2: keep(hang[2], 1, 5)}) == [2], "the fewest only"
assert behind({2: keep(hang[2], 1, 8), 1: stuck[1], 0: hang[0]}) == [1, 2], "ascending"
assert behind({**hang, 1: keep(hang[1], 1, 10)}) == [1], "an open call is a call, too"
print("who-is-behind: correct")


# %% [markdown]
# ### Exercise: make the swapped order visible
#
# No recorder saw the swapped metrics, as both sums stood on **one** line. Real code often has one
# line for each. Then the frames differ, though kind and size do not.
#
# Write `first_other_line(dumps)`. It returns the number of the first call that the ranks made from
# different lines, or `None`. Only calls that **all** ranks made count. On another machine the path
# may differ, so compare the name of the function and the line number, not the file.


# %% tags=["exercise"] exercise="other-line" difficulty=2 minutes=10
def first_other_line(dumps: dict[int, dict[str, Any]]) -> int | None:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `call_site` gives the frame that made the call. Which numbers do all ranks have? A set of each
# rank's numbers, and `set.intersection`.


# %% tags=["solution"]
def first_other_line(dumps: dict[int, dict[str, Any]]) -> int | None:
    calls = [numbered(dump) for dump in dumps.values()]
    for number in sorted(set.intersection(*map(set, calls))):
        sites = [call_site(of_rank[number]) for of_rank in calls]
        if len({(site["name"], site["line"]) for site in sites}) > 1:
            return number
    return None


# %% tags=["check"]
def move(dump: dict[str, Any], number: int, **place: Any) -> dict[str, Any]:
    """The same dump, with call `number` made from another place."""
    changed = copy.deepcopy(dump)
    entry = numbered(changed)[number]
    entry["frames"] = copy.copy(entry["frames"])  # entries with one stack share its frames
    index = entry["frames"].index(call_site(entry))
    entry["frames"][index] = {**call_site(entry), **place}
    return changed


assert first_other_line(swapped) is None, "one line for both sums: nothing to see"
assert first_other_line({**swapped, 2: move(swapped[2], 2, line=999)}) == 2, "another line"
assert first_other_line({**swapped, 2: move(swapped[2], 2, name="other")}) == 2, "and function"
elsewhere = move(swapped[2], 2, filename="/other/program.py")
assert first_other_line({**swapped, 2: elsewhere}) is None, "the path does not matter"
assert first_other_line(hang) == 11, "the early return shows here, too"
lost = {**hang, 0: keep(hang[0], 4, 99), 1: move(hang[1], 2, line=999)}
assert first_other_line(lost) == 11, "call 2 was not recorded on all ranks"
late = {**hang, 1: keep(hang[1], 4, 99), 2: move(hang[2], 2, line=999)}
assert first_other_line(late) == 11, "whichever rank has lost it"
print("other-line: correct")


# %% [markdown]
# ### Exercise: name the suspects
#
# Now automate the verdict, and be fair. Write `suspects(dumps, world_size)`. It looks at the first
# trouble, and returns the ranks, ascending, that do **not** belong to the largest party of ranks
# that made the same call there. A rank that made no call belongs to no party, and is a suspect. If
# two parties are the largest, nobody can tell who is right: then all ranks that dumped are suspects.
# A rank without a dump is never a suspect: you know nothing about it. So it may stand with the second
# party: where two parties exist, and all such ranks could make the second as large as the first,
# nobody can tell either. Without a trouble the list is
# empty. If all made the same call and it is open, it is just running: that is no trouble of a rank.


# %% tags=["exercise"] exercise="suspects" difficulty=3 minutes=15
def suspects(dumps: dict[int, dict[str, Any]], world_size: int) -> list[int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `Counter.most_common()` sorts the parties by size. Leave "no call" out of the count. Add
# `world_size - len(dumps)` to the second party before you compare.


# %% tags=["solution"]
def suspects(dumps: dict[int, dict[str, Any]], world_size: int) -> list[int]:
    trouble = first_trouble(dumps)
    if trouble is None or len({what(entry) for entry in trouble[1].values()}) == 1:
        return []
    made = {rank: what(entry) for rank, entry in trouble[1].items()}
    parties = Counter(call for call in made.values() if call != "no call").most_common(2)
    second = parties[1][1] if len(parties) > 1 else 0
    silent = world_size - len(dumps)
    if second and second + silent >= parties[0][1]:
        return sorted(made)  # with the ranks that are silent, either party may be the larger
    return sorted(rank for rank, call in made.items() if call != parties[0][0])


# %% tags=["check"]
four = {**hang, 3: hang[0]}
assert suspects(hang, 3) == [2], "the early return"
assert suspects(stuck, 3) == [1], "a rank that made no call"
assert suspects(swapped, 3) == [], "nothing to see"
assert suspects({**hang, 2: hang[0]}, 3) == [], "all wait in the same call"
assert suspects(sized, 3) == [0, 2], "one against one, and one silent: nobody can tell"
assert suspects(four, 4) == [2], "three against one"
assert suspects({**four, 3: hang[2]}, 4) == [0, 1, 2, 3], "two against two"
assert suspects(hang, 4) == [0, 1, 2], "the silent one may stand with rank 2"
none = {rank: keep(hang[rank], 1, 8) for rank in hang}
assert suspects({**none, 3: hang[0]}, 4) == [0, 1, 2], "no call is no party"
assert suspects(four, 5) == [2], "here it cannot turn the majority"
print("suspects: correct")

# %% [markdown] tags=["instructor"]
# The third exercise is about fairness of evidence.
#
# The usual answer takes the majority and forgets the ranks that did not dump. Ask: on 512 ranks one
# machine with eight dies, and 504 dumps are left. When does that matter? Plan 30 minutes for all
# three.

# %%
scratch.cleanup()
assert not Path(scratch.name).exists()

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# Your job hangs on Gloo. When do you dump?
#
# - [ ] In the `except` block, after the timeout.
#   > By then Gloo has marked the failed call as over, and the processes may be gone.
# - [x] During the hang, from another thread.
#   > Right. The main thread sits in the collective and cannot do it.
# - [ ] Before each collective.
#   > That costs you in every step, and the last dump may still be the wrong one.

# %% [markdown] tags=["quiz"]
# You call `FlightRecorderHook.attach(group)` and the dump stays empty. What is the likely reason?
#
# - [ ] The backend does not support recording.
#   > It worked on a backend that moves no data at all.
# - [x] Nobody kept the handle that `attach` returned.
#   > Right. Without it the hook is gone in the next moment.
# - [ ] The buffer is full.
#   > A full ring drops the oldest entries. It is never empty.

# %% [markdown] tags=["quiz"]
# An entry `c10d:allreduce` has `retired: True`. Is the call over?
#
# - [ ] Yes.
#   > The hook retires an entry when it hands the call on. Ask the `gloo:` entry.
# - [x] You cannot tell from this entry.
#   > Right. It stands before the backend, and sees no end.
# - [ ] No, `True` means that it hangs.
#   > In this lesson all of the hook's entries had it, of good calls too.

# %% [markdown] tags=["quiz"]
# `torchfrtrace` names ranks 0 to 6 of 8 as culprits. What do you conclude?
#
# - [ ] Seven ranks have the same bug.
#   > Possible, but look at the reference first.
# - [x] Rank 7 was read first, and differs from the others. Look at its line.
#   > Right. Culprit means: differs from the first.
# - [ ] The dumps are damaged.
#   > A damaged dump fails with an error instead.

# %% [markdown] tags=["quiz"] multi=true
# Which of these does a recorder show? Tick all.
#
# - [x] One rank leaves out a collective.
#   > Yes. From that number on it differs, or has no call.
# - [ ] Two sums of one shape, called on one line, in another order.
#   > Number, kind, shape and line are the same on all ranks.
# - [x] One rank brings a tensor of another size.
#   > Yes, in the dumps of the ranks that live.
# - [ ] A tensor with wrong values.
#   > A recorder notes sizes, no values.
