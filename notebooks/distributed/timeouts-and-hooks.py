# ---
# jupyter:
#   course:
#     title: "Stop waiting in the dark: timeouts, hooks and safe objects"
#     summary: >-
#       Bound how long a collective waits, see every collective your job issues, stop a NaN at its
#       source, and exchange objects without running the sender's code.
#     minutes: 45
#     level: core
#     objectives:
#       - Choose between the three timeouts by what each leaves usable afterwards.
#       - Log every collective of a training step with a hook of a few lines.
#       - Use a hook to stop an operation, and say what that does to the other ranks and to DDP.
#       - Exchange objects with weights_only=True, and allow exactly the classes you need.
#       - Replace the names that warn or are gone.
#     prerequisites: []
#     job: {function: logged_training, ranks: 2}
#     features:
#       dist-api-improvements: runs
#       sec-object-collectives: runs
#       control-collectives-removed: inspect
#       sequence-number-noop: runs
#     keypoints:
#       - A timeout of the group or of one operation costs you the group. One of wait does not.
#       - set_timeout is local to a rank, and operations that were issued keep their old limit.
#       - A pre hook sees, changes or stops a collective. A post hook says issued, not finished.
#       - A hook that raises on one rank leaves its peers waiting, and the DDP object unusable.
#       - Pass weights_only=True to object collectives, on all ranks. The default runs what it gets.
#     sources:
#       - title: PyTorch 2.14 release blog, torch.distributed API improvements
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #187387, public set_timeout"
#         url: https://github.com/pytorch/pytorch/pull/187387
#         date: 2026-06-15
#       - title: "PR #158128, timeouts of single operations on Gloo"
#         url: https://github.com/pytorch/pytorch/pull/158128
#         date: 2025-07-11
#       - title: "PR #186300, abort hooks, and hooks before and after a collective"
#         url: https://github.com/pytorch/pytorch/pull/186300
#         date: 2026-06-05
#       - title: "PR #191064, the NaN check hook"
#         url: https://github.com/pytorch/pytorch/pull/191064
#         date: 2026-07-24
#       - title: "PR #190731, get_error of Gloo"
#         url: https://github.com/pytorch/pytorch/pull/190731
#         date: 2026-07-21
#       - title: "PR #189353, weights_only for object collectives"
#         url: https://github.com/pytorch/pytorch/pull/189353
#         date: 2026-07-09
#       - title: "PR #187494, get_backend_impl"
#         url: https://github.com/pytorch/pytorch/pull/187494
#         date: 2026-06-16
#       - title: "PR #191073, gather_single"
#         url: https://github.com/pytorch/pytorch/pull/191073
#         date: 2026-07-25
#       - title: "PR #188617, the control collectives are removed"
#         url: https://github.com/pytorch/pytorch/pull/188617
#         date: 2026-06-30
#       - title: "PR #188611, setting the sequence number does nothing"
#         url: https://github.com/pytorch/pytorch/pull/188611
#         date: 2026-06-30
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. PR #189453, which makes PyTorch's own callers
#       pass weights_only=True to object collectives, is a follow-up that 2.14.1 does not have.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import contextlib
import gc
import inspect
import itertools
import os
import pickle
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: imported later, it keeps that group alive
from torch import nn
from torch._C._distributed_c10d import NanCheckHook
from torch.nn.parallel import DistributedDataParallel

from course.kit import (
    GREEN,
    INK,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    RED,
    expect_error,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()


# %% [markdown]
# A distributed job hangs. Nobody knows which rank is late, which operation it is, or how long the
# others will wait. PyTorch 2.14 makes four tools for this public: a setter for the timeout, hooks
# around every collective, object exchange that does not run foreign code, and access to the backend
# below the group. Here you use each of them, and see what it breaks.
#
# > [!NOTE]
# > The release text files all this under **API Unstable**: names and behaviour may change in any
# > later release, without a deprecation. Names that begin with an underscore, and everything under
# > `torch._C`, are private on top of that. Both are marked below. Pin the version where you use them.
#
# Some words first. A **rank** is one process of the job, and also its number. A **process group**
# is a set of ranks that call **collectives** together. `all_reduce`, which sums a tensor over all
# ranks, is one. **Gloo** is the backend that does this on CPUs, over sockets. **DDP**, short for
# `DistributedDataParallel`, averages gradients between ranks.

# %% [markdown]
# ## The problem: half an hour of silence
#
# Rank 1 is stuck in its data loader. Rank 0 has finished its part and wants to sum. `run_ranks`
# starts one process per rank, and ends them all when its own limit is over.


# %%
def silent_job() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(60)  # stands for a file system that does not answer
    print("asking the others for their sum")
    dist.all_reduce(torch.ones(1))
    print("done")


# %% tags=["raises"]
with expect_error(TimeoutError, match="still ran"):
    run_ranks(silent_job, 2, timeout=8.0)

# %% [markdown]
# The error comes from `run_ranks`, not from PyTorch. Rank 0 printed its one line and would have
# gone on waiting. For how long?

# %% tags=["claim"] claim="timeouts-and-hooks-default" table="default-timeout"
print("limit set  a group waits for")
print("none      ", dist.default_pg_timeout)
assert dist.default_pg_timeout == timedelta(minutes=30)


# %% [markdown]
# ## The smallest thing that works
#
# `dist.set_timeout` sets the limit of a group, also of one that has been running for a while. Two
# helpers go with it. `outcome` runs something and says how it ended. `short` cuts Gloo's message
# down to its middle.


# %%
def short(error: str) -> str:
    """Gloo's message without the place in its source, the address and the advice."""
    return error.rsplit("] ", 1)[-1].split(". This")[0].split(" [")[0]


def outcome(act: Callable[[], object]) -> str:
    """'ok', or what the error says. Keeps no reference to the error itself."""
    try:
        act()
    except RuntimeError as error:
        return short(str(error))
    return "ok"


# %%
def bounded_job() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.set_timeout(timedelta(seconds=0.4))
    if rank == 1:
        time.sleep(1.2)  # three times the limit
    started = time.monotonic()
    result = outcome(lambda: dist.all_reduce(torch.ones(1)))
    waited = time.monotonic() - started
    report("end", result=result, waited=waited)


bounded = run_ranks(bounded_job, 2).events("end")
for rank, end in bounded.items():
    print(f"rank {rank}: {end['result']} (after {end['waited']:.1f} s)")
assert "Timed out" in bounded[0]["result"] and bounded[0]["waited"] > 0.35
assert "by peer" in bounded[1]["result"]

# %% [markdown]
# Rank 0 stops after the limit and names it. Rank 1 comes late, finds the connection closed, and
# hears nothing about a timeout. Remember that for your log files. The full text even guesses that the
# remote worker crashed. It did not: it gave up, and the rank that complains is the late one.
#
# The setter is new as a public function. Its private forerunner still works, and warns.

# %% tags=["claim"] claim="text-set-timeout-stable"
solo_loopback = "lo" if sys.platform == "linux" else "lo0"
os.environ["GLOO_SOCKET_IFNAME"] = solo_loopback  # for the group of one in the next line
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with warnings.catch_warnings(record=True) as caught_warnings:
    warnings.simplefilter("always")
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=1))
print(caught_warnings[0].category.__name__, "for the private name")
assert caught_warnings[0].category is FutureWarning
assert "set_timeout" in dist.distributed_c10d.__all__, "the new one is public"
assert "stable" not in dist.set_timeout.__doc__, "its documentation promises nothing"

# %% [markdown]
# The release text calls `set_timeout` stable in one sentence, under a heading that says API
# Unstable. The package settles only that the name is public.
#
# The first lines of that cell are useful in themselves: a group of **one** rank, in this very
# process. It sends nothing, but runs the same code. It will serve for everything that needs no
# peer.

# %% [markdown]
# ## Three timeouts, and what each leaves
#
# There are three places for a limit:
#
# | limit of | how | counts from |
# |---|---|---|
# | the group | `dist.set_timeout(limit, group)`, `init_process_group(timeout=)`, `new_group(timeout=)` | the start of each operation* |
# | one operation | `group.allreduce(tensor, timeout=limit)`, `dist.barrier(timeout=limit)` | the start of that operation |
# | one wait | `work.wait(limit)` on the handle of an asynchronous operation | that call of `wait` |
#
# \* In Gloo, of each send or receive in it: with many ranks the whole may take longer than the limit.
#
# The middle one needs a method of the group. Which public functions take a timeout?

# %%
public = ["all_reduce", "broadcast", "all_gather", "all_gather_single", "reduce", "barrier"]
takes = {name: "timeout" in inspect.signature(getattr(dist, name)).parameters for name in public}
print("functions of dist:   ", takes)
methods = ["allreduce", "broadcast", "allgather", "all_gather_single", "reduce", "barrier"]
documented = {
    name: "timeout: datetime.timedelta" in getattr(dist.ProcessGroup, name).__doc__
    for name in methods
}
print("methods of the group:", documented)
assert [name for name, yes in takes.items() if yes] == ["barrier"]
assert documented["allreduce"] and documented["broadcast"] and documented["allgather"]

# %% [markdown]
# Of these functions only `barrier` has the argument. For most others you call the method of the
# group: other spelling (`allreduce`), always asynchronous, so call `wait()` on what it returns. A
# pull request of July 2025 brought this to Gloo. What is new is the setter.
#
# Now the experiment. Each kind of limit gets a group of its own. Rank 0 issues an `all_reduce` and
# runs into the limit. Only then does rank 1 come. Afterwards both try the same group once more.


# %%
def start(kind: str, tensor: torch.Tensor, trial: dist.ProcessGroup, limit: timedelta) -> dist.Work:
    """Issue an all_reduce that is limited in one of three ways."""
    if kind == "operation":
        return trial.allreduce(tensor, timeout=limit)
    if kind == "group":
        dist.set_timeout(limit, trial)
    return dist.all_reduce(tensor, group=trial, async_op=True)


# %%
def one_trial(kind: str, seconds: float) -> None:
    trial, tensor, limit = dist.new_group(), torch.ones(1), timedelta(seconds=seconds)
    report("begin", kind=kind)
    if dist.get_rank() == 0:
        work, patience = start(kind, tensor, trial, limit), [limit] if kind == "wait" else []
        report("first", kind=kind, result=outcome(lambda: work.wait(*patience)))
        dist.barrier()  # on the default group: lets rank 1 come
        result = outcome(work.wait)
    else:
        dist.barrier()
        time.sleep(seconds)
        result = outcome(lambda: dist.all_reduce(tensor, group=trial))
    report("second", kind=kind, result=result, value=tensor.item())
    dist.barrier()
    report("after", kind=kind, result=outcome(lambda: dist.all_reduce(tensor, group=trial)))
    dist.barrier()


def three_timeouts(seconds: float) -> None:
    dist.init_process_group("gloo")
    for kind in ("group", "operation", "wait"):
        one_trial(kind, seconds)


# %%
limits = run_ranks(three_timeouts, 2, seconds=0.4)
trials = {
    (rank, entry["kind"], entry["event"]): entry
    for rank, entries in enumerate(limits.reports)
    for entry in entries
}
for (rank, kind, event), entry in trials.items():
    if event != "begin":
        print(f"{kind:10}rank {rank}  {event:7}{entry['result']}")

# %% [markdown]
# `first` is rank 0 at its limit. `second` is the moment when rank 1 has come. `after` is one more
# `all_reduce` on the same group. The cell below states what the table says.

# %% tags=["claim"] claim="text-set-timeout"
for kind in ("group", "operation"):
    assert "Timed out" in trials[0, kind, "first"]["result"]
    assert trials[0, kind, "after"]["result"] == "Application timeout caused pair closure"
    assert "by peer" in trials[1, kind, "after"]["result"]
assert trials[0, "wait", "first"]["result"] == "Operation timed out!"
assert trials[0, "wait", "second"]["result"] == "ok", "the second wait"
assert trials[0, "wait", "second"]["value"] == 2.0, "the sum of both ranks arrived after all"
assert {trials[rank, "wait", "after"]["result"] for rank in (0, 1)} == {"ok"}
print("usable afterwards: the group that was only waited for")

# %% [markdown]
# So there are two kinds, not three. A limit of the group and one of an operation end the
# **operation**. Gloo closes the connection ("pair") and that group is lost, on both ranks. A limit
# of `wait` ends your **patience**: the operation goes on, and you may wait again. A failed operation
# raises its error at each `wait`.
#
# Draw it. Zero is when rank 0 issues the operation.


# %%
def draw_trial(ax: plt.Axes, kind: str) -> None:
    """What both ranks did in one trial, over time."""
    zero = trials[0, kind, "begin"]["at"]
    first, second = (trials[0, kind, event]["at"] - zero for event in ("first", "second"))
    late = trials[1, kind, "second"]["at"] - zero
    ax.barh(0, first, height=0.5, color=PALE_BLUE, edgecolor=INK, label="waits")
    ax.barh(1, late, height=0.5, color=PALE_ORANGE, hatch="//", edgecolor=INK, label="late")
    ax.plot(first, 0, "X", color=RED, markersize=10)
    if trials[0, kind, "second"]["result"] == "ok":
        bar = {"color": PALE_GREEN, "hatch": "..", "edgecolor": INK, "label": "waits again"}
        ax.barh(0, second - first, left=first, height=0.5, **bar)
        ax.plot([second, late], [0, 1], "o", color=GREEN, markersize=10, linestyle="")
    else:
        ax.plot(late, 1, "X", color=RED, markersize=10)
    usable = trials[0, kind, "after"]["result"] == "ok"
    ax.set_title(f"limit of the {kind}: group {'usable' if usable else 'lost'}", loc="left")
    ax.set_yticks([0, 1], ["rank 0", "rank 1"])
    ax.set_ylim(1.6, -0.6)


# %%
fig, axes = plt.subplots(3, 1, figsize=(7, 5.4), sharex=True, layout="constrained")
for ax, kind in zip(axes, ("group", "operation", "wait"), strict=True):
    draw_trial(ax, kind)
axes[-1].set_xlabel("seconds (cross: error, circle: the sum arrived)")
fig.legend(*axes[-1].get_legend_handles_labels(), ncols=3, loc="outside lower center")
show(
    fig,
    alt="Three timelines of two ranks. With a limit of the group or of the operation, rank 0 ends "
    "with an error, and rank 1 too as soon as it comes. With a limit of wait, rank 0 has an error, "
    "waits again, and both ranks get the sum at the same time.",
)

# %% [markdown]
# Which one to take?
#
# - **The group**, generous at start-up and short in the loop: `dist.set_timeout` after the first
#   step. Then a dead peer costs seconds. Be ready for a new group afterwards, for example by
#   [rebuilding it in place](rebuild-in-place.py).
# - **One operation**, where one call is known to be slower than all others: `barrier(timeout=)` while
#   rank 0 writes a checkpoint. It may also be longer than the limit of the group.
# - **wait**, where you want to report and go on waiting.

# %% [markdown]
# ## The fine print
#
# Four questions that decide whether a timeout helps you, asked of two ranks:
#
# 1. Does a new limit of the group hold for an operation that is already under way?
# 2. Does it hold on the other ranks?
# 3. Is a limit of zero refused?
# 4. After an error, does the backend admit it? `get_error` asks it for its state, `abort` tells it
#    to give up.
#
# `dist.get_backend_impl(group)` is new, too. It returns the object below the group,
# here a `ProcessGroupGloo`. What that offers differs between backends and is not promised.


# %%
def touch_sequence_number(trial: dist.ProcessGroup) -> None:
    """Set a private counter, and read it. This too is for a later section."""
    dist.get_backend_impl(trial)._set_sequence_number_for_group()
    report("set", number=trial._get_sequence_number_for_group())


def lose_a_group(lost: dist.ProcessGroup) -> None:
    """Run into a timeout, then ask the backend how the group is."""
    dist.set_timeout(timedelta(seconds=0.2), lost)
    result = outcome(lambda: dist.all_reduce(torch.ones(1), group=lost))
    report("lost", result=result, state=dist.get_backend_impl(lost).get_error().name)


def abort_and_go_on() -> None:
    total = torch.ones(1)
    report("abort", result=outcome(dist.group.WORLD.abort))
    dist.all_reduce(total)
    report("after abort", total=total.item())


# %%
def fine_print() -> None:
    dist.init_process_group("gloo")
    rank, trial, zero, lost = dist.get_rank(), *(dist.new_group() for _ in range(3))
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=trial, async_op=True)
        dist.set_timeout(timedelta(seconds=0.2), trial)
        report("pending", result=outcome(lambda: work.wait(timedelta(seconds=0.6))))
        lose_a_group(lost)
    report("count", number=trial._get_sequence_number_for_group())  # private, for a later section
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=trial)
    else:
        report("pending later", result=outcome(work.wait))
    limit = dist.get_backend_impl(trial).options._timeout  # private
    report("limit", text=str(limit))
    dist.set_timeout(timedelta(0), zero)
    dist.barrier()
    report("zero", result=outcome(lambda: dist.all_reduce(torch.ones(1), group=zero)))
    abort_and_go_on()
    touch_sequence_number(trial)
    dist.barrier()


fine = run_ranks(fine_print, 2, quiet=True)

# %% tags=["claim"] claim="timeouts-and-hooks-future"
print("1. under way:", fine.events("pending")[0]["result"])
print("   later:    ", fine.events("pending later")[0]["result"])
print("2. limit by rank:", {r: e["text"] for r, e in fine.events("limit").items()})
assert fine.events("pending")[0]["result"] == "Operation timed out!", "wait gave up, not the group"
assert fine.events("pending later")[0]["result"] == "ok", "it kept the limit it was issued with"
assert fine.events("limit")[0]["text"] == "0:00:00.200000"
assert fine.events("limit")[1]["text"] == str(dist.default_pg_timeout), "rank 1 never set one"

# %% [markdown]
# A pending operation keeps its old limit. And the setter is **local**: call it on all ranks, or only
# some of them will give up in time.

# %% tags=["claim"] claim="pr-gloo-abort-noop"
print("3. zero:", {rank: entry["result"] for rank, entry in fine.events("zero").items()})
lost_group = fine.events("lost")[0]
print("4.", lost_group["result"], "- and the state is", lost_group["state"])
print("   abort:", fine.events("abort")[0]["result"])
print("   sum after abort:", fine.events("after abort")[0]["total"])
assert "Timed out" in lost_group["result"] and lost_group["state"] == "SUCCESS"
assert {entry["result"] for entry in fine.events("abort").values()} == {"ok"}
assert {entry["total"] for entry in fine.events("after abort").values()} == {2.0}

# %% [markdown]
# Zero is accepted, and does not mean "no limit": the operation mostly times out, and now and then it is
# quick enough, on one rank or on both. Guard against it where a limit is computed. Gloo reports `SUCCESS` for a group that is
# lost, and `abort` changes nothing: the group goes on working. On Gloo, trust the exception of
# the operation and nothing else. According to PR #190731, `nccl2` does report an error there; that
# was not run here.

# %% [markdown] tags=["instructor"]
# Before you run the three trials, let the room vote: after which limits is the group usable?
#
# Most say "after all of them", some "after none". Hardly anybody expects the limit of one operation
# to cost the whole group. Common wrong answer: "one operation only, so only that one fails". Ask
# what a half-finished sum leaves in the sockets: the next operation would read the bytes of this
# one. Closing is the safe choice. Fifteen minutes up to here.

# %% [markdown]
# ## See every collective
#
# A timeout tells you *that* a collective hung. Which one? A **pre hook** runs on the calling rank
# before each collective is issued. It is a function of one argument, and you choose a number by
# which it can be removed.


# %%
def log_collectives(watched: dist.ProcessGroup, log: list, hook_id: int = 1) -> None:
    """Append (operation, bytes that this rank puts in) to `log` for every collective."""

    def note(args) -> None:
        log.append((args.name.name, sum(tensor.nbytes for tensor in args.input_tensors)))

    watched.register_pre_hook(hook_id, note)


solo, solo_log = dist.group.WORLD, []  # the group of one rank from above
log_collectives(solo, solo_log)
dist.all_reduce(torch.ones(3))
dist.broadcast(torch.ones(2), src=0)
dist.all_gather_object([None], {"step": 3})
print(solo_log)
assert [name for name, _ in solo_log] == ["ALLREDUCE", "BROADCAST", "ALLGATHER", "ALLGATHER"]

# %% [markdown]
# Four entries for three calls: exchanging an object takes two `all_gather`, one for the sizes and
# one for the bytes. The hook sees what is really issued.
#
# `args` has more: `output_tensors`, `root`, `async_op`, and `op_id`, a running number that a post
# hook sees too. The tensors are the real ones, not copies.

# %% [markdown]
# ### What a training step sends
#
# Now let two ranks train with DDP, and log four phases: the wrapping and three steps. The small
# network has a `BatchNorm1d` on purpose. `bucket_cap_mb` sets how many bytes DDP collects before it
# sends them.


# %%
def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512)
    )


def logged_training() -> None:
    dist.init_process_group("gloo")
    log: list = []
    log_collectives(dist.group.WORLD, log)
    model = DistributedDataParallel(make_network(), bucket_cap_mb=1)
    report("phase", name="wrap", log=log.copy())
    for step in (1, 2, 3):
        log.clear()
        model(torch.randn(8, 256)).square().mean().backward()
        report("phase", name=f"step {step}", log=log.copy())
    dist.barrier()


logged = run_ranks(logged_training, 2, quiet=True)
phases = {entry["name"]: [tuple(pair) for pair in entry["log"]] for entry in logged.reports[0]}
for name, entries in phases.items():
    print(f"{name}:", ", ".join(f"{op} {size}" for op, size in entries))

# %% [markdown]
# Name, then bytes. As a picture, on a logarithmic scale:

# %%
looks = {"ALLGATHER": (PALE_GREEN, "..")}
looks |= {"BROADCAST": (PALE_BLUE, ""), "ALLREDUCE": (PALE_ORANGE, "//")}
fig, ax = plt.subplots(figsize=(7, 3.4))
position, seams = 0, []
for name, entries in phases.items():
    seams.append((position - 0.5, position + len(entries) / 2 - 0.5, name))
    for op, size in entries:
        colour, hatch = looks[op]
        ax.bar(position, size, color=colour, hatch=hatch, edgecolor=INK)
        position += 1
for left, middle, name in seams:
    ax.axvline(left, color=INK, linewidth=1, linestyle=":")
    ax.annotate(name, (middle, 3e7), ha="center")
for op, (colour, hatch) in looks.items():
    ax.fill([], [], facecolor=colour, hatch=hatch, edgecolor=INK, label=op)
ax.set(yscale="log", ylim=(1, 2e8), xlim=(-0.5, position - 0.5), xticks=[])
ax.set(xlabel="collectives of rank 0, in order", ylabel="bytes put in")
ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
show(
    fig,
    alt="Bars for every collective of rank 0. Wrapping: one all-gather and three broadcasts, one of "
    "them large. Each step: two broadcasts, then all-reduces. Step 2 has two broadcasts more.",
)

# %% [markdown]
# You can read the life of a DDP model from it:
#
# - **wrap**: compare the shapes of all parameters, then send all weights and buffers from rank 0.
# - **every step**: send the buffers of `BatchNorm1d`, *before* the forward pass. If your ranks may
#   keep their own statistics, `broadcast_buffers=False` saves these.
# - **step 1** sums all gradients in one piece. Then DDP has seen in which order they become ready.
#   At the start of **step 2** the ranks agree on new buckets, and from there on the gradients of the
#   last layer leave first.

# %%
network = make_network()
gradient_bytes = sum(weight.nbytes for weight in network.parameters())
buffer_bytes = sum(buffer.nbytes for buffer in network.buffers())
for name in ("step 1", "step 2", "step 3"):
    reduced = [size for op, size in phases[name] if op == "ALLREDUCE"]
    assert sum(reduced) == gradient_bytes, "every gradient is sent exactly once"
    print(f"{name}: {gradient_bytes} bytes of gradients in {len(reduced)} pieces")
assert reduced[0] == sum(weight.nbytes for weight in network[3].parameters()), "last layer first"
broadcasts = [size for op, size in phases["step 3"] if op == "BROADCAST"]
assert sum(broadcasts) == buffer_bytes == sum(buffer.nbytes for buffer in network[1].buffers())
assert len(phases["step 2"]) > len(phases["step 3"])

# %% [markdown]
# ### What a hook does not see
#
# A hook belongs to **one** group on **one** rank. Check what passes by it, in the group of one.

# %% tags=["claim"] claim="timeouts-and-hooks-bypass"
sub_group = dist.new_group([0])
invisible = {
    "another group": lambda: dist.all_reduce(torch.ones(1), group=sub_group),
    "a new group": lambda: dist.new_group([0]),
    "monitored_barrier": dist.monitored_barrier,
    "the backend itself": lambda: dist.get_backend_impl().allreduce([torch.ones(1)]).wait(),
}
for what, call in invisible.items():
    solo_log.clear()
    call()
    print(f"{what:20}{len(solo_log)} entries")
    assert solo_log == []

# %% [markdown]
# The first line matters most. Tensor parallelism, pipelines and FSDP often use groups of their own.
# Attach your hook to each of them: a device mesh tells with `mesh.get_group()`.
#
# The last line is documented: what you call on the backend object bypasses the hooks, and
# `torch.compile` too.
#
# Two more things to know before you use hooks: they can change what is sent, and the number that you
# choose matters.


# %%
def times_ten(args) -> None:
    args.input_tensors[0].mul_(10)


solo.register_pre_hook(2, times_ten)
changed = torch.ones(1)
dist.all_reduce(changed)
solo.unregister_pre_hook(2)
second_log: list = []
log_collectives(solo, second_log, hook_id=1)  # the number that `solo_log` uses
solo_log.clear()
dist.all_reduce(torch.ones(1))
print("sum of one 1:", changed.item(), " first log:", solo_log, " second log:", second_log)
assert changed.item() == 10.0
assert solo_log == [] and len(second_log) == 1, "the second one replaced the first, in silence"
log_collectives(solo, solo_log, hook_id=1)

# %% [markdown]
# Two libraries that both choose the number 1 lose one hook without a word. Take numbers from one
# counter.

# %% [markdown]
# ## Post means issued, not finished
#
# There is a **post hook** as well, and its name misleads. Let rank 1 come late again. Rank 0 reports
# when its post hook runs, and when the operation is really over. For the second it asks the
# operation's *future*, an object that calls you back.


# %%
def issued_or_finished() -> None:
    dist.init_process_group("gloo")
    control, finished = dist.new_group(), threading.Event()

    def when_finished(_) -> None:
        report("finished")
        finished.set()

    def after_issue(args) -> None:
        report("post hook", completed=args.work.is_completed())
        args.work.get_future().add_done_callback(when_finished)

    if dist.get_rank() == 0:
        dist.group.WORLD.register_post_hook(1, after_issue)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier(group=control)  # lets rank 1 come
        work.wait()
        finished.wait(10)
    else:
        dist.barrier(group=control)
        time.sleep(0.3)
        report("rank 1 comes")
        dist.all_reduce(torch.ones(1))
    dist.barrier(group=control)


# %%
late_run = run_ranks(issued_or_finished, 2, quiet=True)
moments = {entry["event"]: entry for entries in late_run.reports for entry in entries}
zero = moments["post hook"]["at"]
for event in ("post hook", "rank 1 comes", "finished"):
    print(f"{event:14}{1000 * (moments[event]['at'] - zero):6.0f} ms")
assert not moments["post hook"]["completed"]
assert moments["post hook"]["at"] < moments["rank 1 comes"]["at"] < moments["finished"]["at"]

# %% [markdown]
# The post hook ran before rank 1 had even come. If you measure the length of a collective between
# pre hook and post hook, you measure only the issuing. Use the future, as `after_issue` does; the
# argument of a post hook has no tensors.
#
# A third kind, the **abort hook**, is meant to run before a backend gives up, so that you can save
# what you know. Gloo has none.

# %% tags=["raises", "claim"] claim="text-collective-hooks"
with expect_error(RuntimeError, match="does not support registerAbortHook"):
    solo.register_abort_hook(1, lambda: print("about to abort"))
assert all(hasattr(dist.ProcessGroup, f"register_{kind}_hook") for kind in ("pre", "post", "abort"))

# %% [markdown]
# ## Stop a collective: the NaN guard
#
# A pre hook that raises stops the operation on its rank. Nothing is sent. PyTorch brings one such
# hook: `NanCheckHook` looks for NaN, "not a number", in the inputs. The class is private. The
# environment variable `TORCH_DIST_NAN_CHECK=1` attaches it to every group.

# %%
guard = NanCheckHook.attach(solo)
values = {
    "NaN": torch.tensor([1.0, float("nan")]),
    "infinity": torch.tensor([float("inf")]),
    "bfloat16 NaN": torch.tensor([float("nan")], dtype=torch.bfloat16),
    "integers": torch.tensor([1]),
}
verdicts = {
    name: outcome(lambda value=value: dist.all_reduce(value)) for name, value in values.items()
}
guard.remove()
print(verdicts)
assert verdicts["NaN"] == verdicts["bfloat16 NaN"] == "NaN found in input tensor."
assert verdicts["infinity"] == verdicts["integers"] == "ok"

# %% [markdown]
# An infinity passes: the guard is no check for overflow. It reads every input once, so it costs time.
#
# In a job the guard sits on every rank, and only one rank has the NaN. What do the others see? Two
# ranks train, and rank 1 gets a broken batch in the third step. Note the use of `set_timeout`: the
# limit becomes short once training runs.


# %%
def poisoned_training() -> None:
    dist.init_process_group("gloo")
    rank, control = dist.get_rank(), dist.new_group()
    model = DistributedDataParallel(nn.Linear(4, 1))
    for step in (1, 2, 3):
        batch = torch.ones(8, 4)
        if step == 3:
            dist.set_timeout(timedelta(seconds=1))
            batch[0, 0] = float("nan") if rank == 1 else 1.0
        loss = model(batch).sum()
        begin = time.monotonic()
        result = outcome(loss.backward)
        report("step", step=step, result=result, waited=time.monotonic() - begin)
    dist.barrier(group=control)  # nobody hangs up before all have seen their error


poisoned = run_ranks(poisoned_training, 2, quiet=True, env={"TORCH_DIST_NAN_CHECK": "1"})
for rank, entries in enumerate(poisoned.reports):
    for entry in entries:
        print(f"rank {rank} step {entry['step']}: {entry['result']} ({entry['waited']:.1f} s)")

# %% tags=["claim"] claim="timeouts-and-hooks-nan-any-backend"
third = {rank: entry for rank, entry in poisoned.events("step").items()}
assert third[1]["result"] == "NaN found in input tensor." and third[1]["waited"] < 0.9
assert "Timed out" in third[0]["result"] and third[0]["waited"] > 0.9
print("the reason is known on rank 1 only; rank 0 paid the whole timeout")

# %% [markdown]
# The guilty rank learns the reason at once. The innocent rank waits for the whole limit, and its
# message blames the network. In a large job all logs but one say "timed out". Search for the one line
# that does not.
#
# And what is left of DDP? Use the group of one, where no peer can time out. A hook stops one
# gradient bucket, and is then removed.


# %%
def train_once(model: nn.Module) -> str:
    model.zero_grad()
    return outcome(lambda: model(torch.ones(8, 4)).sum().backward())


def veto(args) -> None:
    raise RuntimeError("stopped by a hook")


solo_net = nn.Linear(4, 1)
solo_model = DistributedDataParallel(solo_net)
before = [train_once(solo_model) for _ in range(2)]
solo.register_pre_hook(7, veto)
stopped = train_once(solo_model)
solo.unregister_pre_hook(7)
later = train_once(solo_model)
print("before:", before, "\nstopped:", stopped, "\nafter:", later[:72])
solo_model = DistributedDataParallel(solo_net)
rewrapped = train_once(solo_model)
print("wrapped anew:", rewrapped)
assert stopped == "stopped by a hook" and later != "ok" and rewrapped == "ok"

# %% [markdown]
# The step after the stop fails for a reason of DDP's own: it still waits for the gradients of the
# stopped step. The text differs with the moment, and may even ask you to report a bug. A new wrapper
# cures it. A hook that *raises* is for finding a bug. For a job that shall go on, let it **take
# notes**, as in the last exercise.

# %% [markdown] tags=["instructor"]
# Ask before the run with the broken batch: what does rank 0 print?
#
# Common wrong answers: "the same error", and "NaN, as the sum is NaN". The second is right *without*
# the guard, and it is the idea of the third exercise: a NaN tells everybody by itself, a veto tells
# only the guilty one. Let them find that out; do not say it here.

# %% [markdown]
# ## Objects that are not data
#
# `all_gather_object` and its relatives send Python objects. They use pickle, and a pickle may tell
# the receiver to **call** something. The class below does. It is harmless: it calls `print`.


# %%
class Greeting:
    """Not data, but a call that happens in whoever unpickles it."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __reduce__(self) -> tuple:
        return (print, (self.words,))


# %%
def try_exchange(case: str, mine: object, weights_only: bool) -> None:
    gathered = [None, None]
    try:
        dist.all_gather_object(gathered, mine, weights_only=weights_only)
        report(case, refused="")
    except pickle.UnpicklingError as error:
        report(case, refused=str(error))


def exchange_objects() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = Greeting("rank 1 chose this line") if rank == 1 else {"step": 3}
    try_exchange("default", mine, weights_only=False)
    try_exchange("safe", mine, weights_only=True)
    try_exchange("disagreeing", {"step": 3}, weights_only=rank == 0)
    total = torch.ones(1)
    dist.all_reduce(total)
    report("after", total=total.item())


# %%
exchanged = run_ranks(exchange_objects, 2, quiet=True)
for rank, text in enumerate(exchanged.output):
    print(f"rank {rank} printed:", text.splitlines()[0])
refusals = {rank: entry["refused"] for rank, entry in exchanged.events("safe").items()}
for rank, error in refusals.items():
    print(f"rank {rank}, weights_only:", re.findall(r"Unsupported global: GLOBAL \S+", error))

# %% [markdown]
# The line appears on **both** ranks: rank 1 chose it, and rank 0 ran it. With `weights_only=True`
# both refuse, and name what was refused. The refusal comes after the exchange, so the group stays in
# step.

# %% tags=["claim"] claim="text-weights-only-objects,notes-object-collectives-default"
assert [text.count("rank 1 chose this line") for text in exchanged.output] == [1, 1]
assert all("GLOBAL print" in error for error in refusals.values()) and len(refusals) == 2
assert {entry["refused"] for entry in exchanged.events("default").values()} == {""}
assert {entry["total"] for entry in exchanged.events("after").values()} == {2.0}
six = ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
       "send_object_list", "recv_object_list"]  # fmt: skip
defaults = {inspect.signature(getattr(dist, n)).parameters["weights_only"].default for n in six}
print("default of weights_only in all six:", defaults)
assert defaults == {False}

# %% [markdown]
# The default is `False`, as before, because existing programs send all sorts of classes. So you have
# to ask for it. It narrows what a message can call. It does not check who sent it: keep the ports of
# a job away from strangers all the same.
#
# ### What it costs
#
# The hook in the group of one weighs each exchange: its second entry is the size of the message.


# %%
@dataclass
class Settings:
    rate: float = 0.1


def exchange(thing: object, weights_only: bool) -> tuple[str, int]:
    """How the exchange of one object ends, and how many bytes it takes."""
    solo_log.clear()
    try:
        dist.all_gather_object([None], thing, weights_only=weights_only)
        return "ok", solo_log[1][1]
    except pickle.UnpicklingError:
        return "refused", solo_log[1][1]


# %%
things = {
    "dict with a tensor": {"step": 3, "loss": torch.ones(2)},
    "an exception": ValueError("boom"),
    "a dtype": torch.bfloat16,
    "a large tensor": torch.ones(100_000),
    "own dataclass": Settings(),
    "numpy array": np.ones(2),
    "timedelta": timedelta(seconds=1),
}
fates = {name: (exchange(thing, False), exchange(thing, True)) for name, thing in things.items()}
for name, ((_, plain), (fate, checked)) in fates.items():
    print(f"{name:20}{plain:8} bytes   weights_only: {fate:8}{checked:8} bytes")

# %%
refused = [name for name, (_, (fate, _)) in fates.items() if fate == "refused"]
print("refused:", refused)
assert refused == ["own dataclass", "numpy array", "timedelta"]
surcharge = [checked - plain for (_, plain), (_, checked) in fates.values()]
assert all(1000 < extra < 2000 for extra in surcharge), "about a kilobyte each, whatever the size"

# %% [markdown]
# Two prices: classes that PyTorch does not know are refused, and each message grows by about a
# kilobyte, because it becomes a small archive. For the first there are two ways out. Allow exactly
# the class you mean, on **every** rank. Or send plain data.

# %%
with torch.serialization.safe_globals([Settings]):
    print("inside the block:", exchange(Settings(), True)[0])
    assert exchange(Settings(), True)[0] == "ok"
print("after the block: ", exchange(Settings(), True)[0])
print(
    "as plain data:   ", exchange(vars(Settings()), True)[0], exchange(np.ones(2).tolist(), True)[0]
)
assert exchange(Settings(), True)[0] == "refused"
assert exchange(vars(Settings()), True)[0] == "ok"


# %% [markdown]
# `add_safe_globals` allows a class for the rest of the process. Never allow a function, or a class
# whose construction does things, or the door is open again.
#
# One more rule. `weights_only=True` is another format on the wire, so all ranks must say the same. In
# the run above they also disagreed once, about a plain dictionary:

# %% tags=["claim"] claim="timeouts-and-hooks-match-flag"
for rank, entry in exchanged.events("disagreeing").items():
    print(f"rank {rank}:", re.split("[.,]", entry["refused"])[0])
    assert entry["refused"], "neither can read what the other sent"

# %% [markdown]
# ## Names that moved
#
# ### One tensor: `*_single`
#
# Collectives that use one large tensor, instead of a list of tensors, are now all called
# `*_single`. Call each pair in the group of one, and collect the warnings.


# %%
def call_collective(name: str, *tensors: torch.Tensor) -> tuple[str, list[str]]:
    """How the call ends, and the kinds of warnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = outcome(lambda: getattr(dist, name)(*tensors))
    return result, [warning.category.__name__ for warning in caught]


pairs = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "gather_into_tensor": "gather_single",
}
calls = {
    name: call_collective(name, torch.ones(1), torch.ones(1))
    for pair in pairs.items()
    for name in pair
}
for name, (result, kinds) in calls.items():
    print(f"{name:24}{result:46}{kinds}")

# %% tags=["claim"] claim="text-single-names"
for old_name, new_name in pairs.items():
    assert calls[old_name][1] == ["FutureWarning"], "the old name warns"
    assert calls[new_name][1] == [], "the new one does not"
    assert calls[old_name][0] == calls[new_name][0], "both do the same"
unsupported = [name for name, (result, _) in calls.items() if result != "ok"]
print("not on Gloo:", unsupported)
assert unsupported == ["gather_into_tensor", "gather_single"]

# %% [markdown]
# `gather_single` exists by name; Gloo has no such operation. There, call `dist.gather` with the rows of
# one large tensor as the list: `list(large.unbind())`.

# %% [markdown]
# ### Control collectives: gone
#
# `_ControlCollectives` and `_StoreCollectives` were private classes: small sums, gathers and barriers
# through the **store**, the key-value server of a job, without any process group. They are removed,
# with their header files. If you used them, the store has what you need. A job's own store is
# `dist.group.WORLD.get_group_store()`.

# %% tags=["claim"] claim="text-control-collectives"
headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
gone = ["_ControlCollectives", "_StoreCollectives"]
for name in gone:
    assert not hasattr(dist, name) and not hasattr(torch._C._distributed_c10d, name)
assert (headers / "Store.hpp").exists() and not (headers / "control_collectives").exists()
print("removed:", gone)


# %%
def store_sum(store: dist.Store, key: str, value: int, world_size: int) -> int:
    """The sum of `value` over all ranks, through the store alone. Use each key once."""
    store.add(f"{key}/sum", value)
    if store.add(f"{key}/count", 1) == world_size:  # the last one opens the gate
        store.set(f"{key}/done", "yes")
    store.wait([f"{key}/done"], timedelta(seconds=10))
    return store.add(f"{key}/sum", 0)


shared_store = dist.HashStore()
with ThreadPoolExecutor(3) as three_ranks:  # threads stand for ranks: a HashStore is in memory
    sums = list(three_ranks.map(lambda v: store_sum(shared_store, "votes", v, 3), [1, 10, 100]))
print("sums seen by three ranks:", sums)
assert sums == [111, 111, 111]

# %% [markdown]
# ### The sequence number: read it, do not set it
#
# Every group counts its collectives, on every rank. The getter is private, and useful: when a job
# hangs, the rank with the **smaller** number is behind. The run for the fine print asked for it at the
# moment when rank 0 had issued its operation, and rank 1 had not.

# %%
counts = {rank: entry["number"] for rank, entry in fine.events("count").items()}
print("collectives issued in that group, by rank:", counts)
assert counts == {0: 1, 1: 0}

# %% [markdown]
# The setter had been empty for years. It is gone from the group; on the backend object it stays, for
# other projects, and warns once, from C++: the same run called it, and its output holds the warning.

# %% tags=["claim"] claim="text-sequence-number"
print(fine.output[0].split("Warning: ")[-1].split(" (")[0])
assert "deprecated and is now a no-op" in fine.output[0]
print("after setting it:", {rank: entry["number"] for rank, entry in fine.events("set").items()})
assert {entry["number"] for entry in fine.events("set").values()} == {1}, "still one collective"
assert not hasattr(dist.ProcessGroup, "_set_sequence_number_for_group")
assert hasattr(dist.ProcessGroup, "_get_sequence_number_for_group")

# %% [markdown]
# ## On real hardware
#
# Everything above ran on a CPU, with Gloo. On NVIDIA GPUs, with NCCL, three things differ according to
# the documentation of `set_timeout` and `NanCheckHook`. None of them was run for this page.
#
# - A call returns before the GPU has begun. When the limit is over, a watchdog aborts the collective
#   in the background and **ends the process**, because later GPU work might use corrupted data.
# - The default limit is 10 minutes, not 30.
# - The NaN check fails on the device, as an assertion of the GPU, and not as an exception at the call.


# %%
def log_on_gpus() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    log: list = []
    log_collectives(dist.group.WORLD, log)
    dist.set_timeout(timedelta(seconds=30))
    dist.all_reduce(torch.ones(4, device=device))
    print(log, "on", dist.get_backend_impl(device=device).name())
    dist.destroy_process_group()


# %% tags=["hardware"] hardware="cuda"
if torch.cuda.device_count() < 2:
    print("skipped: NCCL needs one CUDA GPU per rank, two in all, and this machine has fewer")
else:
    run_ranks(log_on_gpus, 2)

# %% [markdown]
# ## Your turn
#
# ### Exercise: wait with a heartbeat
#
# A long wait should show signs of life. Write `wait_with_heartbeat(work, every, beat)`. It waits
# until `work` is done, and calls `beat()` each time that `every` seconds have passed without a result.
# A real failure must come out as an exception, at once and without a beat.


# %% [markdown]
# This is the program that will use it. Its first operation finds rank 1 late. For the second, rank 1
# never comes, and the group has a limit of half a second.


# %%
def heartbeats() -> None:
    dist.init_process_group("gloo")
    strict, tensor, beats = dist.new_group(), torch.ones(1), []
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        began = time.monotonic()
        wait_with_heartbeat(work, 0.1, lambda: beats.append(1) or report("beat"))
        waited = time.monotonic() - began
        report("first", beats=len(beats), waited=waited, total=tensor.item())
        dist.set_timeout(timedelta(seconds=0.5), strict)
        work = dist.all_reduce(tensor, group=strict, async_op=True)
        result = outcome(lambda: wait_with_heartbeat(work, 5.0, lambda: report("beat")))
        report("second", result=result)
    else:
        time.sleep(1.0)
        dist.all_reduce(tensor)
    dist.barrier()


# %% [markdown]
# Now the function that it lacks.


# %% tags=["exercise"] exercise="heartbeat" difficulty=1 minutes=8
def wait_with_heartbeat(work: dist.Work, every: float, beat: Callable[[], None]) -> None:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# Running out of patience and a failed operation raise the same class of error. `work.is_completed()`
# tells them apart: a failed operation is complete, too. And what if it completes between the error and
# your question? Waiting for completed work costs nothing, and raises its error if it has one.


# %% tags=["solution"]
def wait_with_heartbeat(work: dist.Work, every: float, beat: Callable[[], None]) -> None:
    while True:
        try:
            work.wait(timedelta(seconds=every))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # done in the meantime, or the real error
                return
        beat()


# %% tags=["check"]
done_work = dist.all_reduce(torch.ones(1), async_op=True)
wait_with_heartbeat(done_work, 1.0, lambda: None)
# "still ran after 30 s"? Then your function takes the failure for one more reason to wait.
beaten = run_ranks(heartbeats, 2, quiet=True, timeout=30.0)
first_wait, second_wait = beaten.events("first")[0], beaten.events("second")[0]
assert first_wait["total"] == 2.0, "the sum must have arrived"
assert 2 <= first_wait["beats"] <= first_wait["waited"] / 0.1 + 1, "a beat each tenth of a second"
assert "Timed out" in second_wait["result"], "a real failure comes out"
assert second_wait["at"] - first_wait["at"] < 3.0, "at once, not at the next beat"
assert len([e for e in beaten.reports[0] if e["event"] == "beat"]) == first_wait["beats"]
print("heartbeat: correct")

# %% [markdown]
# ### Exercise: a budget for collectives
#
# A colleague adds a metric to the training loop, and with it one `all_reduce` for each layer. Nobody
# notices, until the job is slow. Make a test fail instead.
#
# Write the context manager `at_most(group, limit)`. Inside its block, each collective of
# this group after the first `limit` raises a `RuntimeError` that names the operation, and is not
# issued. After the block, also after an error, nothing is left. Other hooks stay. Budgets may be nested,
# and each counts what happens inside it. A collective that another budget stopped may count or not.


# %% tags=["exercise"] exercise="budget" difficulty=2 minutes=10
@contextlib.contextmanager
def at_most(group: dist.ProcessGroup, limit: int) -> Iterator[None]:
    raise NotImplementedError
    yield


# %% [markdown] tags=["hint"]
# What happens to the outer budget if both hooks have the same number? One `itertools.count(1000)`
# for the whole program gives numbers that nobody has had; 1 is the log's. For the clean-up, think of `try` and `finally` around `yield`.


# %% tags=["solution"]
budget_ids = itertools.count(1_000_000)


@contextlib.contextmanager
def at_most(group: dist.ProcessGroup, limit: int) -> Iterator[None]:
    names: list[str] = []

    def spend(args) -> None:
        names.append(args.name.name)
        if len(names) > limit:
            raise RuntimeError(f"{args.name.name} is collective {len(names)}, allowed: {limit}")

    hook_id = next(budget_ids)
    group.register_pre_hook(hook_id, spend)
    try:
        yield
    finally:
        group.unregister_pre_hook(hook_id)


# %% tags=["check"]
def spend_ones(number: int) -> None:
    for _ in range(number):
        dist.all_reduce(torch.ones(1))


with at_most(solo, 2):
    spend_ones(2)
with at_most(solo, 5):
    with at_most(solo, 3):
        spend_ones(3)
    spend_ones(2)
    error_text = outcome(lambda: spend_ones(1))
    assert "ALLREDUCE" in error_text, "the outer budget counts what the inner one let pass"
with at_most(solo, 9):
    with at_most(solo, 0):
        number = solo._get_sequence_number_for_group()
        assert "BROADCAST" in outcome(lambda: dist.broadcast(torch.ones(1), src=0))
        assert "ALLREDUCE" in outcome(lambda: spend_ones(1)), "and every later one"
        assert solo._get_sequence_number_for_group() == number, "stopped, not only reported"
    assert outcome(lambda: spend_ones(3)) == "ok", "nothing is left of the inner budget"
try:
    with at_most(solo, 0):
        raise KeyError("an error of the block")
except KeyError:
    assert outcome(lambda: spend_ones(20)) == "ok", "nothing is left after an error"
solo_log.clear()
spend_ones(1)
assert [name for name, _ in solo_log] == ["ALLREDUCE"], "the hook of the log is still there"
print("budget: correct")

# %% [markdown]
# ### Exercise: skip the poisoned step, name the culprit
#
# `NanCheckHook` stops the job. You want to go on: when one rank has a NaN in its gradients, **all**
# ranks skip that step, none of them waits for a timeout, and the log says whose fault it was. You may
# not add a single collective, on any group.
#
# Write two functions. `witness(group)` registers a pre hook that never raises, and returns a
# dictionary. The hook sets its entry `"mine"` to `True` when this rank puts a NaN into a collective.
# `guarded_step(optimizer, weights, evidence)` is called on every rank after `backward()`. It steps and
# returns `"stepped"`, or leaves everything as it is and returns `"skipped: mine"` or
# `"skipped: a peer's"`. Afterwards the evidence is fresh for the next step.


# %% [markdown]
# Two ranks train with it. Rank 1 has a broken batch in step 4, and rank 0 one in step 5.


# %%
def issued() -> int:
    """Collectives of this rank so far, on all its groups (the list of groups is private)."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def guarded_training() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(8, 1))  # rank 0's weights for all
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9)
    evidence = witness(dist.group.WORLD)
    for step in range(1, 8):
        batch = torch.randn(16, 8)
        if (rank, step) in {(1, 4), (0, 5)}:
            batch[3, 3] = float("nan")
        optimizer.zero_grad()
        before = issued()
        model(batch).square().mean().backward()
        result = guarded_step(optimizer, weights, evidence)
        used = issued() - before
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        total = float(sum(x.detach().double().sum() for x in weights + momenta))
        report("step", step=step, result=result, used=used, total=total)
    dist.barrier()


# %% [markdown]
# Now the two functions that it lacks.

# %% tags=["exercise"] exercise="skip-poisoned" difficulty=3 minutes=15
# write both functions in place of the dots:
#     def witness(group: dist.ProcessGroup) -> dict[str, bool]:
#     def guarded_step(optimizer, weights: list[nn.Parameter], evidence: dict[str, bool]) -> str:
witness = guarded_step = ...


# %% [markdown] tags=["hint"]
# What is one plus NaN? After `backward()`, every rank holds the **averaged** gradients. Does a rank
# need a message to learn that somebody had a NaN? And what does the averaged gradient *not* tell, that
# only the input of the collective tells?


# %% tags=["solution"]
def witness(group: dist.ProcessGroup) -> dict[str, bool]:
    evidence = {"mine": False}

    def look(args) -> None:
        floats = [tensor for tensor in args.input_tensors if tensor.is_floating_point()]
        if any(bool(tensor.isnan().any()) for tensor in floats):
            evidence["mine"] = True

    group.register_pre_hook(2_000_000, look)
    return evidence


def guarded_step(optimizer, weights: list[nn.Parameter], evidence: dict[str, bool]) -> str:
    mine, evidence["mine"] = evidence["mine"], False
    if any(bool(weight.grad.isnan().any()) for weight in weights):  # a sum with a NaN is a NaN
        return "skipped: mine" if mine else "skipped: a peer's"
    optimizer.step()
    return "stepped"


# %% tags=["check"]
assert callable(witness) and callable(guarded_step), "write the functions first"
guarded = run_ranks(guarded_training, 2, quiet=True, timeout=30.0)
results = [[entry["result"] for entry in entries] for entries in guarded.reports]
totals = [[entry["total"] for entry in entries] for entries in guarded.reports]
peer, mine = "skipped: a peer's", "skipped: mine"
assert [line[3:5] for line in results] == [[peer, mine], [mine, peer]], "who put the NaN in"
assert all(line[:3] + line[5:] == ["stepped"] * 5 for line in results), "and no other step"
assert totals[0] == totals[1], "the same weights everywhere"
unchanged = totals[0][2] == totals[0][3] == totals[0][4]
assert unchanged and totals[0][4] != totals[0][5], "steps 4 and 5 change nothing, momentum included"
assert {entry["used"] for entry in guarded.reports[0][2:]} == {1}, "no extra collective"
print("results of rank 1:", results[1])
print("skip-poisoned: correct")

# %% [markdown]
# The group of one has served its time.

# %%
solo = sub_group = solo_model = guard = done_work = None  # the last holders of the groups
dist.destroy_process_group()
gc.collect()
print("a group is left:", dist.is_initialized())
assert not dist.is_initialized()

# %% [markdown] tags=["instructor"]
# The third exercise separates those who copy from those who think.
#
# A tempting answer asks everybody with one more `all_reduce` of a flag. It works, and costs a round
# for every step; the check refuses it. Another one raises in the hook: rank 0 then waits for half an
# hour. If a group is stuck, ask: "what is in `weight.grad` on rank 0 after `backward()`?" Plan 35
# minutes for all three.

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# You call `group.allreduce(tensor, timeout=limit).wait()` on Gloo, and it times out. What now?
#
# - [ ] Call it again. Only that one operation was lost.
#   > Look at `after` in the table: the connections are closed, and every further call fails.
# - [x] The group is lost, on this rank and its peers. Make a new one or rebuild it.
#   > Right. Only a limit of `wait` leaves the group usable.
# - [ ] Raise the limit with `set_timeout`, then go on.
#   > A limit does not reopen a closed connection.

# %% [markdown] tags=["quiz"]
# Rank 0 calls `dist.set_timeout(timedelta(seconds=10))`. What is the limit on rank 1?
#
# - [ ] Ten seconds, as the setter tells the group.
#   > It tells the object in this process. The run for the fine print showed both values.
# - [x] What it was before.
#   > Right. Call it on all ranks.
# - [ ] The smaller of the two.
#   > Nobody compares them.

# %% [markdown] tags=["quiz"]
# You measure the time between pre hook and post hook of an asynchronous `all_reduce`. What is it?
#
# - [ ] The time on the network.
#   > The post hook ran before the other rank had even come.
# - [x] The time to issue the operation.
#   > Right. For its end ask the future of `args.work`.
# - [ ] The time that this rank waited for its peers.
#   > Waiting happens later, in `wait`.

# %% [markdown] tags=["quiz"] multi=true
# A pre hook raises on rank 1, in the backward pass of DDP. What follows? Tick all.
#
# - [x] Rank 0 waits until its timeout.
#   > Yes. Nothing was sent, and nobody told it.
# - [ ] Rank 0 gets the same exception.
#   > Exceptions do not travel between ranks.
# - [x] The DDP object of rank 1 cannot be used further.
#   > Yes. Its next step fails with a message that misleads. Wrap the network anew.
# - [ ] The network's weights are damaged.
#   > The weights are untouched: the optimizer has not stepped.

# %% [markdown] tags=["quiz"]
# With `weights_only=True` your job fails: "Unsupported global: GLOBAL train.Config". What is the best
# answer?
#
# - [ ] Go back to `weights_only=False`.
#   > Then every sender can run code in every receiver again.
# - [x] Send `vars(config)`, or allow exactly this class on every rank.
#   > Right. Plain data needs no permission at all.
# - [ ] Allow the class on the rank that sends.
#   > It is the receiver that refuses. In `all_gather_object` that is every rank.
