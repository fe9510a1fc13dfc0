# ---
# jupyter:
#   course:
#     title: Lose a rank, rebuild the group in place, train on
#     summary: Keep a training job alive when one of its processes is killed; know what it costs.
#     minutes: 40
#     level: deeper
#     budget_seconds: 90
#     budget_reason: >-
#       About thirty processes import torch, and two recoveries wait for a timeout on purpose.
#     objectives:
#       - Rebuild a process group in place from the handles of the survivors.
#       - Write a training loop that loses a rank and goes on from the furthest survivor's state.
#       - Name the precautions of a recovery, and what happens when one is missing.
#       - Choose between rebuilding in place, a new group and a restart, from numbers you measured.
#       - Admit a replacement into a running group.
#     prerequisites: []
#     job: {function: train_through_faults, ranks: 3, arguments: {steps: 1000, wait_seconds: 30.0}}
#     features:
#       c10d-fault-tolerance: runs
#       imp-gloo-fault-tolerance: runs
#     keypoints:
#       - PyTorch rebuilds the group. Who is a member, and the state of the model, are yours.
#       - Each survivor first rebuilds alone. That closes its old sockets, so that all notice.
#       - Leave the except block before you recover, and keep the error's text, not the error.
#       - Each rebuild takes a new uuid, fresh handles in rank order, and a new DDP wrapper.
#       - In place is about as fast as a new group. What it saves is the restart and the objects.
#     sources:
#       - title: PyTorch 2.14 release blog, Fault-Tolerant Collectives in c10d
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #186298, the reconfigure interfaces"
#         url: https://github.com/pytorch/pytorch/pull/186298
#       - title: "PR #187381, reconfigure for Gloo"
#         url: https://github.com/pytorch/pytorch/pull/187381
#       - title: "PR #189359, reconfigure for nccl2"
#         url: https://github.com/pytorch/pytorch/pull/189359
#       - title: "PR #191384, the reference text of the three functions"
#         url: https://github.com/pytorch/pytorch/pull/191384
#     moved_in_215: >-
#       The entry points are still private in 2.15.0. Nothing else was compared.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import contextlib
import copy
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course.kit import (
    BLUE,
    INK,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    RED,
    draw_timeline,
    plot_style,
    program_of,
    report,
    run_ranks,
    show,
)

plot_style()


# %% [markdown]
# A training job on many machines loses one of them. Until 2.13 the usual answer is to stop
# everything and start again from the last checkpoint. PyTorch 2.14 offers another: the survivors
# rebuild their process group *in place* and go on. In this lesson you kill processes for real, and
# you write the loop that survives it.
#
# > [!NOTE]
# > The release text calls this feature **API Unstable**: names and behaviour may change in any
# > later release, without a deprecation. The three functions begin with an underscore, so they are
# > private too. Pin the version of torch where you depend on them.
#
# Some words first. A **rank** is one process of the job, and also its number. A **process group**
# is the set of ranks that call collectives together, such as `all_reduce`, which sums a tensor over
# all of them. **Gloo** is the backend that does this on CPUs, over sockets. A **store** is a small
# key-value server that all ranks can reach.

# %% [markdown]
# ## The problem: one dies, all die
#
# First a small model to train. Nothing in it is special. Every rank starts from the same weights
# and draws its own batches.


# %%
def make_problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network and its optimizer, the same on every rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def batches(member: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An endless stream of (inputs, targets), different for each member."""
    true_weights = torch.randn(32, 1, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(100 + member)
    while True:
        inputs = torch.randn(64, 32, generator=draw)
        yield inputs, (inputs @ true_weights).tanh()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch) -> float:
    inputs, targets = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()  # DistributedDataParallel averages the gradients between the ranks here
    optimizer.step()
    return loss.item()


# %% [markdown]
# Now the loop as you know it. `DistributedDataParallel`, DDP for short, averages the gradients. The
# helper `short` cuts Gloo's error text down to its middle.


# %%
def old_loop(steps: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    net, optimizer = make_problem()
    model = DistributedDataParallel(net)
    data = batches(dist.get_rank())
    for step in range(1, steps + 1):
        train_step(model, optimizer, next(data))
        print(f"step {step}")
        time.sleep(0.01)  # stands for the work of a larger model


def short(error: str) -> str:
    """Gloo's message without the place in its source before it and the advice after it."""
    return error.rsplit("] ", 1)[-1].split(". This")[0]


# %% [markdown]
# `run_ranks` starts one process per rank. As soon as rank 1 prints `step 20`, it gets a SIGKILL
# from outside. Like a machine that loses power, it cannot clean up or say goodbye.

# %%
old_run = run_ranks(old_loop, 3, kill={1: "step 20"}, check=False, quiet=True, steps=60)
print("exit codes by rank:", old_run.exit_codes)
for rank in (0, 2):
    finished = old_run.output[rank].count("step ")
    error = [line for line in old_run.output[rank].splitlines() if "Error: " in line][-1]
    print(f"rank {rank} ended after {finished} of 60 steps: {short(error)}")
assert old_run.exit_codes[1] == -signal.SIGKILL
assert old_run.exit_codes[0] != 0 and old_run.exit_codes[2] != 0, "the healthy ranks died too"


# %% [markdown]
# Nothing was wrong with ranks 0 and 2. Their weights were good, their data was at hand. They died
# because their process group cannot lose a member: the next `all_reduce` raised a `RuntimeError`,
# and no call mends the group.

# %% [markdown]
# ## The smallest thing that works
#
# Three steps rebuild a group:
#
# 1. Open it with `enable_reconfigure=True`. It has no connections yet.
# 2. Every process asks for its **handle**, a string that says how to reach it, and makes it known
#    to the others. That is your job; the store is good for it.
# 3. Every process calls `_reconfigure` with the same **uuid**, a number you never used before, and
#    the same list of handles. The position in the list becomes the rank.
#
# And one rule for the end: nobody hangs up while a slower peer may still need the connection. So
# all wait for each other in the store.


# %%
def leave_together(store: dist.Store, size: int) -> None:
    """End this process when all `size` members are done."""
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)
    dist.destroy_process_group()
    end_process()


def end_process() -> None:
    """End without Python's shutdown, which may abort while a thread of Gloo is still busy."""
    sys.stdout.flush()
    os._exit(0)


# %% [markdown]
# Below, three processes form a group, then two of them form the next one, in another order. We call
# the number that a process was born with its *member* number, because its rank will change.


# %%
def shrink_on_purpose() -> None:
    store, member, world_size = next(dist.rendezvous("env://"))  # who am I, from the environment
    dist.init_process_group(
        "gloo", store=store, rank=member, world_size=world_size, enable_reconfigure=True
    )
    for uuid, members in [(1, [0, 1, 2]), (2, [2, 0])]:
        if member in members:
            store.set(f"handle/{uuid}/{member}", dist._get_reconfigure_handle())
            handles = [store.get(f"handle/{uuid}/{other}").decode() for other in members]
            dist._reconfigure(uuid, handles).wait()
            total = torch.tensor([10.0**member])
            dist.all_reduce(total)
            rank, size = dist.get_rank(), dist.get_world_size()
            print(f"uuid {uuid}: member {member} is rank {rank} of {size}, sum {total.item():g}")
            report("joined", uuid=uuid, rank=rank, size=size, total=total.item())
    leave_together(store, world_size)


small_run = run_ranks(shrink_on_purpose, 3)

# %% [markdown]
# Read the sums. Member $m$ adds $10^m$, so the digits of a sum name the members. The first group
# has all three. In the second, member 1 is missing, and member 2 is rank 0, because its handle
# stands first in the list.

# %% tags=["claim"] claim="rebuild-new-members,rebuild-list-order"
assert {r["total"] for reports in small_run.reports for r in reports if r["uuid"] == 1} == {111.0}
second = {
    member: r for member, reports in enumerate(small_run.reports) for r in reports if r["uuid"] == 2
}
assert {r["total"] for r in second.values()} == {101.0}
assert {member: r["rank"] for member, r in second.items()} == {2: 0, 0: 1}
print("members of the second group and their ranks:", {m: r["rank"] for m, r in second.items()})

# %% [markdown]
# No process was started, and none had to exit. But nothing here was automatic. PyTorch rebuilds the
# group, and no more. Everything else is yours, and the rest of this lesson builds it: notice the
# loss, agree on who is left, and bring all survivors to the same state.
#
# First a look at the names.

# %% tags=["claim"] claim="rebuild-private"
names = [name for name in dir(dist) if "reconfigure" in name]
print("names with 'reconfigure' in torch.distributed:", names)
assert names == ["_get_reconfigure_handle", "_reconfigure", "_supports_reconfigure"]


# %% [markdown]
# Each begins with an underscore. The only public part is the argument `enable_reconfigure`.

# %% [markdown]
# ## A loop that survives
#
# ### Open the group
#
# `dist.rendezvous("env://")` reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, which
# every launcher sets. The timeout is how long a collective waits for a silent peer.


# %%
def connect(timeout: float) -> tuple[dist.Store, int]:
    """Open a group that can be rebuilt. Returns the store and this process's member number."""
    store, member, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=member,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        enable_reconfigure=True,
    )
    return store, member


# %% [markdown]
# ### Agree on who is left
#
# After a loss the survivors must all use *the same* list. If two of them disagree by one member,
# the rebuild waits for somebody who never comes. So hold a **roll call** in the store: everybody
# puts a card there, and the first complete list that reaches the store is the law. `compare_set`
# writes only where nothing stands yet, and returns what stands there afterwards.
#
# One loss at a time is the common case, so all cards but one are `enough`. With more losses the
# roll call ends when the patience is over. Each attempt has a number, the **generation**, so that
# no card of an earlier attempt counts.
#
# The price of this rule: if nobody died and one rank was only slow, that rank is counted out. It
# ends with a message, and may come back as a newcomer. One store also means one law: two halves of
# a job cannot both believe that they are the survivors.


# %%
def roll_call(
    store: dist.Store,
    generation: int,
    member: int,
    card: str,
    candidates: list[int],
    enough: int,
    patience: float = 20.0,
) -> list[int]:
    """Put `card` in the store, and agree with the others on who is in this generation."""
    store.set(f"{generation}/card/{member}", card)
    deadline, present = time.monotonic() + patience, []
    while len(present) < enough and time.monotonic() < deadline:
        time.sleep(0.002)
        present = [other for other in candidates if store.check([f"{generation}/card/{other}"])]
    members = json.loads(store.compare_set(f"{generation}/members", "", json.dumps(present)))
    if member not in members:
        raise SystemExit(f"member {member} came too late for generation {generation}")
    return members


# %% [markdown]
# ### Leave, then rebuild
#
# The first line of the body below is the precaution that matters most. Each process first rebuilds
# a group in which it is **alone**. That closes its old sockets, and the others notice at once. You
# will see later what happens without it.
#
# The handle changes with every rebuild, so the card carries the one from after that line. No uuid
# is used twice: one for the group, one for each process alone.


# %%
def rebuild(
    store: dist.Store,
    generation: int,
    member: int,
    candidates: list[int],
    enough: int,
    leave_first: bool = True,
) -> list[int]:
    """Rebuild the group from all candidates that answer. Returns its members, in rank order."""
    if leave_first:
        alone = [dist._get_reconfigure_handle()]
        dist._reconfigure(1000 * generation + 1 + member, alone).wait()
    handle = dist._get_reconfigure_handle()
    members = roll_call(store, generation, member, handle, candidates, enough)
    handles = [store.get(f"{generation}/card/{other}").decode() for other in members]
    dist._reconfigure(1000 * generation, handles).wait()
    return members


# %% [markdown]
# ### Bring everybody to the same state
#
# A rank can die in the middle of a collective: some survivors already have the sum and take the
# step, others get the error. So after a rebuild survivors may be one step apart.
#
# Everybody copies weights **and** momentum from whoever is furthest. Say `group_src`, the rank in
# the rebuilt group: after a rebuild, numbers from before mean nothing.


# %%
def adopt_furthest(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Copy weights and momentum from the member that is furthest. Returns its step."""
    slots = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(slots, torch.tensor([step]))
    steps = [int(slot) for slot in slots]
    source = steps.index(max(steps))
    for weight in net.parameters():
        state = optimizer.state[weight]
        # zero momentum is the same as none: before the first step there is nothing to copy yet
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(weight))
        dist.broadcast(weight.detach(), group_src=source)
        dist.broadcast(momentum, group_src=source)
    return steps[source]


# %% [markdown]
# ### The loop
#
# The loop asks one question per turn: *is my group stale?* At the start it is, so founding the
# group and mending it are the same code. The `except` block only takes notes. The recovery happens
# in the next turn, when the error object is gone. A loss during a recovery is caught the same way.


# %%
def train_through_faults(steps: int, wait_seconds: float) -> None:
    store, member = connect(wait_seconds)
    members = list(range(int(os.environ["WORLD_SIZE"])))
    group, enough = dist.group.WORLD, len(members)
    net, optimizer = make_problem()
    data = batches(member)
    step, generation, stale = 0, 1, True
    while step < steps:
        try:
            if stale:
                members = rebuild(store, generation, member, members, enough)
                step = adopt_furthest(net, optimizer, step)
                model, stale = DistributedDataParallel(net), False
                report("rebuilt", generation=generation, rank=dist.get_rank())
            loss = train_step(model, optimizer, next(data))
            step += 1
            report("step", step=step, generation=generation, loss=loss)
            time.sleep(0.01)
        except RuntimeError as error:
            report("noticed", step=step, reason=str(error))
            if generation == 5:
                raise  # a bug of your own raises RuntimeError too: do not retry it for ever
            generation, stale, enough = generation + 1, True, len(members) - 1
    report("end", same_group=dist.group.WORLD is group, weights=sum_of_weights(net))
    leave_together(store, len(members))


# %% [markdown]
# One helper is missing: a number that tells whether two ranks hold the same weights.


# %%
def sum_of_weights(net: nn.Module) -> float:
    """One number for all weights: ranks with the same weights get the same number."""
    return float(sum(weight.detach().double().sum() for weight in net.parameters()))


# %% [markdown]
# Four ranks, and member 2 gets a SIGKILL when it reports step 30.

# %%
in_place = run_ranks(
    train_through_faults, 4, kill={2: '"step": 30'}, quiet=True, steps=90, wait_seconds=10.0
)
print("exit codes by member:", in_place.exit_codes)
for member, values in in_place.events("noticed").items():
    print(f"member {member} noticed after step {values['step']}: {short(values['reason'])}")
for member, values in in_place.events("rebuilt").items():
    print(f"member {member} is rank {values['rank']} of generation {values['generation']}")
assert in_place.exit_codes == [0, 0, -signal.SIGKILL, 0]

# %% [markdown]
# The killed member has the exit code of SIGKILL, the others ended well, and member 3 is now rank 2.
# Member 2 is listed with generation 1 only. The next cell proves two things: all survivors end with
# the same weights, and the group is still the same Python object.

# %% tags=["claim"] claim="article-in-place-reconfiguration,rebuild-same-object,rebuild-gloo,article-gloo-fault-tolerance"
end = in_place.events("end")
assert sorted(end) == [0, 1, 3], "all survivors reached the last step"
assert len({values["weights"] for values in end.values()}) == 1, "with the same weights"
assert all(values["same_group"] for values in end.values()), "in the same group object"
print("same weights on", len(end), "survivors, same group object")

# %% [markdown]
# ## Look inside
#
# Every report carries a time from one clock, so you can draw what each rank did. Zero is the
# SIGKILL.

# %%
Span = tuple[int, float, float, str]


def spans_of(member: int, reports: list[dict], zero: float) -> list[Span]:
    """What one rank did, as (rank, start, end, what), in milliseconds after `zero`."""
    spans, what, since = [], "starting", reports[0]["at"]
    for entry in reports:
        now = {"rebuilt": "training", "noticed": "rebuilding"}.get(entry["event"])
        if now is not None or entry is reports[-1]:
            spans.append((member, 1000 * (since - zero), 1000 * (entry["at"] - zero), what))
            what, since = now, entry["at"]
    return spans[1:]  # without the start


# %%
killed = in_place.killed_at[2]
spans = [span for member in range(4) for span in spans_of(member, in_place.reports[member], killed)]
rebuilt_last = max(end for *_, end, what in spans if what == "rebuilding")
left, right = -rebuilt_last, 2.2 * rebuilt_last
fig, ax = plt.subplots(figsize=(7, 3))
draw_timeline(
    ax,
    [(m, max(a, left), min(b, right), what) for m, a, b, what in spans if b > left and a < right],
    [(2, 0.0, "SIGKILL")],
)
ax.set_xlim(left, right)
ax.set_xlabel("milliseconds after the SIGKILL")
show(
    fig,
    alt="Timeline of four ranks. Rank 2 is killed at zero; the other three stop training, rebuild "
    "for a moment, and train again at the same time. Rank 2 has nothing after zero.",
)

# %% [markdown]
# The hatched bars are the rebuild. The stretch before them, from zero on, is the time to notice.
# Some ranks may notice later than others: they see nothing until a neighbour leaves and so closes
# its sockets. All bars end together, as a rebuild is a collective act.
#
# And the training? The loss goes on from where it was.

# %%
fig, ax = plt.subplots(figsize=(7, 2.8))
for member, colour, line in [(0, BLUE, "-"), (2, RED, "--")]:
    curve = [r for r in in_place.reports[member] if r["event"] == "step"]
    losses = [r["loss"] for r in curve]
    ax.plot([r["step"] for r in curve], losses, line, color=colour, label=f"rank {member}")
ax.axvline(30, color=INK, linewidth=1, linestyle=":")
ax.annotate(" SIGKILL", (30, ax.get_ylim()[1]), va="top")
ax.set_xlabel("optimizer step")
ax.set_ylabel("loss on own batch")
ax.set_ylim(0, None)
ax.legend()
show(fig, alt="Loss of rank 0 falls over 90 steps without a jump at step 30, where rank 2 ends.")
losses = [r["loss"] for r in in_place.reports[0] if r["event"] == "step"]
before, after = sum(losses[20:30]) / 10, sum(losses[-10:]) / 10
print(f"mean loss of ten steps: before the kill {before:.3f}, at the end {after:.3f}")
assert after < before


# %% [markdown]
# ## Break it: forget one precaution
#
# The loop has two precautions that look like pedantry: leave first, and recover outside `except`.
# Forget each of them once, and see. The functions below lose a rank several times in a row and
# recover by another *way* each time:
#
# - `stays`: no group of one before the roll call.
# - `keeps the error`: the error object is still alive during the recovery. The same happens when
#   you recover inside the `except` block, or when a logger or a debugger holds the traceback.
# - `new group`: no rebuild. `destroy_process_group`, then `init_process_group`, as in 2.13.


# %%
def recover(
    way: str, store: dist.Store, generation: int, member: int, members: list[int], enough: int
) -> list[int]:
    """Get a working group again, in one of several ways. Returns its members."""
    if way != "new group":
        return rebuild(store, generation, member, members, enough, leave_first=way != "stays")
    dist.destroy_process_group()
    members = roll_call(store, generation, member, "here", members, enough)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"group {generation}", store),  # no address of the dead group
        rank=members.index(member),
        world_size=len(members),
    )
    return members


# %% [markdown]
# The loop is the one you know, with fewer reports. Each step begins with a small `all_reduce`, as
# in jobs that agree on a stop signal. After twenty steps of a generation, the last member waits for
# its SIGKILL.


# %%
def train_with_ways(ways: list[str], wait_seconds: float) -> None:
    importlib.import_module("torch.distributed.nn.functional")  # before the group: see below
    store, member = connect(wait_seconds)
    members, (net, optimizer) = list(range(int(os.environ["WORLD_SIZE"]))), make_problem()
    data, step, generation, stale, kept = batches(member), 0, 1, True, None
    while True:
        try:
            if stale:
                model, enough = None, len(members) - (generation > 1)
                way = ways[generation - 1]
                members = recover(way, store, generation, member, members, enough)
                step = begun = adopt_furthest(net, optimizer, step)
                model, stale, kept = DistributedDataParallel(net), False, None
            dist.all_reduce(torch.zeros(1))
            train_step(model, optimizer, next(data))
            step += 1
            report("step", step=step, generation=generation)
            if step == begun + 20 and generation == len(ways):
                return leave_together(store, len(members))
            if step == begun + 20 and member == members[-1]:
                report(f"settled {generation}")
                time.sleep(60)
        except RuntimeError as error:
            generation, stale = generation + 1, True
            kept = error if ways[generation - 1] == "keeps the error" else kept


# %% [markdown]
# Five ranks start, and three are lost one after the other. A silent peer is waited for three
# seconds.

# %%
WAIT_SECONDS = 3.0
ways = ["founding", "stays", "keeps the error", "new group"]
victims = [4, 3, 2]
forgetful = run_ranks(
    train_with_ways,
    5,
    kill={victim: f"settled {generation}" for generation, victim in enumerate(victims, start=1)},
    quiet=True,
    ways=ways,
    wait_seconds=WAIT_SECONDS,
)
print("exit codes by member:", forgetful.exit_codes)
assert forgetful.exit_codes == [0, 0, *[-signal.SIGKILL] * 3]


# %% [markdown]
# What does a recovery cost? Two numbers: the **seconds** from the SIGKILL until the last survivor
# has done its next step, and the **steps redone**, which survivors had done before and do again.
# The way `in place` is the run of four ranks that you saw first.


# %%
def cost(steps: list[dict], killed_at: float, generation: int) -> tuple[float, int]:
    """(seconds, steps redone) of the recovery that leads to `generation`.

    `steps` are the reports of the survivors, each with `at`, `step`, `generation` and `member`.
    """
    before = max(entry["step"] for entry in steps if entry["generation"] == generation - 1)
    first: dict[int, dict] = {}
    for entry in steps:
        if entry["generation"] == generation:
            first.setdefault(entry["member"], entry)
    seconds = max(entry["at"] for entry in first.values()) - killed_at
    return seconds, before + 1 - min(entry["step"] for entry in first.values())


def steps_of(rank_run, members: list[int]) -> list[dict]:
    """The step reports of these members, each with its member number."""
    return [
        {"member": member, **entry}
        for member in members
        for entry in rank_run.reports[member]
        if entry["event"] == "step"
    ]


# %%
costs = {"in place": cost(steps_of(in_place, [0, 1, 3]), in_place.killed_at[2], 2)}
for generation, (way, victim) in enumerate(zip(ways[1:], victims, strict=True), start=2):
    alive = list(range(victim))  # the highest member was killed
    costs[way] = cost(steps_of(forgetful, alive), forgetful.killed_at[victim], generation)
for way, (seconds, redone) in costs.items():
    print(f"{way:16} {seconds:6.2f} s   {redone} steps redone")
assert costs["stays"][0] > 0.9 * WAIT_SECONDS, "a survivor waited for the whole timeout"
assert costs["keeps the error"][0] > 0.9 * WAIT_SECONDS, "and here too"
assert costs["in place"][0] < 0.5 * WAIT_SECONDS
assert costs["new group"][0] < 0.5 * WAIT_SECONDS
assert {redone for _, redone in costs.values()} == {0}
print("timeout of a group that sets none:", dist.default_pg_timeout)

# %% [markdown]
# Each forgotten precaution costs the **whole timeout** of the group, and the last line shows what
# that is when you set none. This is the mechanism:
#
# ```mermaid
# flowchart LR
#   A["rank 2 is killed"] --> B["its neighbours in the ring get an error"]
#   B --> C["the others wait for a neighbour that is alive but silent"]
#   C -->|"neighbours leave first"| D["sockets close, all get an error at once"]
#   C -->|"neighbours stay"| E["nothing closes: wait for the timeout"]
# ```
#
# Gloo sends an `all_reduce` around a ring. A rank that does not talk to the dead one in that moment
# learns nothing from its death. It waits for a neighbour, and that neighbour sits in the roll call.
# The group of one closes the neighbour's sockets. An error object that you keep holds on to the
# failed operation, and with it to the sockets, so that leaving does not close them.
#
# A **new group** does not need the group of one, as the end of the old group closes its sockets. It
# does need the rest, and one thing more: nothing may hold on to the old group object. That is why
# the loop sets `model = None` first. There is a hidden holder too, as the next cell shows.

# %%
FIND_HOLDER = """
import gc, importlib, sys, weakref
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if sys.argv[1] == "before":
    importlib.import_module("torch.distributed.nn.functional")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
DistributedDataParallel(torch.nn.Linear(2, 2))
gc.collect()
dist.destroy_process_group()
print("alive" if group() is not None else "gone")
"""

# %%
loopback = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
whens = ["by DDP, after the group was made", "before"]
children = [
    subprocess.Popen(
        [sys.executable, "-c", FIND_HOLDER, when], env=loopback, stdout=subprocess.PIPE, text=True
    )
    for when in whens
]
fates = [child.communicate(timeout=60)[0].strip() for child in children]
for when, fate in zip(whens, fates, strict=True):
    print(f"torch.distributed.nn.functional imported {when}: old group is {fate}")
assert fates == ["alive", "gone"]


# %% [markdown]
# DDP imports a module of torch whose functions have the default group as a default argument. Python
# evaluates such a default once, at the import. If that happens while the old group exists, the
# functions keep it for ever, its sockets stay open, and the others wait for the timeout. A rebuild
# in place does not care: it swaps the connections *inside* the one group object that all hold.

# %% [markdown] tags=["instructor"]
# Before the run with five ranks, let the room vote: which of the ways are slow, and how slow?
#
# Most people expect `stays` to hang for ever, and nobody expects `keeps the error` to matter.
# Common wrong answer: "the dead rank's sockets are closed, so everybody notices". Draw the ring of
# five on the board, cross out one rank, and ask who talks to whom. Allow ten minutes for this
# section.

# %% [markdown]
# ## Break it: what the calls refuse, and what they do not
#
# Three ranks try calls that look right. Then one is killed, and the survivors go on with the
# **old** DDP object. Both survivors use the same batch, so the average of their gradients must
# equal the gradient of one plain copy of the net.


# %%
def try_refused_calls(member: int) -> None:
    """Report what each of some wrong calls says."""
    first = [dist._get_reconfigure_handle()]
    calls = {
        "a collective before the first rebuild": lambda: dist.all_reduce(torch.ones(1)),
        "a group of one": lambda: dist._reconfigure(1 + member, first).wait(),
        "a handle from before the last rebuild": lambda: dist._reconfigure(10 + member, first),
        "a uuid that was used before": lambda: dist._reconfigure(
            1 + member, [dist._get_reconfigure_handle()]
        ),
    }
    for what, call in calls.items():
        text = "no error"
        try:
            call()
        except RuntimeError as error:
            text = str(error)
        report("call", what=what, text=text)


# %%
def gradient_ratio(model: nn.Module, plain: nn.Module, inputs: torch.Tensor) -> float:
    """Norm of the gradient that DDP averages, divided by that of the plain net."""
    norms = []
    for net in (model, plain):
        net.zero_grad()
        net(inputs).square().mean().backward()
        norms.append(next(net.parameters()).grad.norm())
    return float(norms[0] / norms[1])


# %%
def keep_old_ddp() -> None:
    store, member = connect(10.0)
    try_refused_calls(member)
    rebuild(store, 1, member, [0, 1, 2], enough=3)
    net, _ = make_problem()
    plain, model = copy.deepcopy(net), DistributedDataParallel(net)
    inputs, _ = next(batches(0))
    if member == 1:
        report("waiting for the kill")
        time.sleep(60)
    with contextlib.suppress(RuntimeError):  # rank 1 dies: this backward pass never ends well
        gradient_ratio(model, plain, inputs)
    members = rebuild(store, 2, member, [0, 1, 2], enough=2)
    kept_ddp = [gradient_ratio(model, plain, inputs) for _ in range(3)]
    new_ddp = gradient_ratio(DistributedDataParallel(net), plain, inputs)
    listed = dist.get_process_group_ranks(dist.group.WORLD)
    report("ratios", old=kept_ddp, new=new_ddp, listed=listed, size=dist.get_world_size())
    leave_together(store, len(members))


# %% tags=["claim"] claim="rebuild-uuid-unique"
traps = run_ranks(keep_old_ddp, 3, kill={1: "waiting for the kill"}, quiet=True)
calls = {entry["what"]: entry["text"] for entry in traps.reports[0] if entry["event"] == "call"}
for what, text in calls.items():
    print(f"{what}:\n    {text}")
assert calls["a group of one"] == "no error"
assert "Call reconfigure() before" in calls["a collective before the first rebuild"]
assert "not part of the new" in calls["a handle from before the last rebuild"]
assert "requires a unique uuid" in calls["a uuid that was used before"]

# %% [markdown]
# Three calls are refused at once, with a text that names the cause: read it as "collect the handles
# anew" and "count on". The old DDP object is worse, because it says nothing.

# %%
for member, values in traps.events("ratios").items():
    old_ratios = " ".join(f"{ratio:.3f}" for ratio in values["old"])
    print(f"member {member}: gradient of the old DDP / true gradient, three steps: {old_ratios}")
    print(f"          of a new DDP: {values['new']:.3f}, ranks listed: {values['listed']}")
    assert abs(values["old"][0] - 2 / 3) < 1e-4, "divided by three, but two are left"
    assert abs(values["new"] - 1) < 1e-4
    assert (values["listed"], values["size"]) == ([0, 1, 2], 2)


# %% [markdown]
# The old object divides the sum of two gradients by the size of the group that died. The failed
# backward pass left that divisor behind. Only the first step is wrong, no error is raised, and the
# loss curve will not tell you. So wrap the net in a **new** DDP object on **all** ranks after every
# rebuild. That copies nothing: the weights belong to `net`.
#
# The list of ranks is stale as well. After a rebuild trust `get_rank()` and `get_world_size()`
# only, and build sub-groups and device meshes anew.

# %% [markdown]
# ## Measure it: in place, a new group, or a restart
#
# The classic answer is the restart: `torchrun --max-restarts` sees the dead rank, ends the others,
# and starts all anew from the last checkpoint. Here is that loop. It writes a checkpoint every ten
# steps.


# %%
def train_from_checkpoint(folder: str, meeting_point: str, steps: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # every attempt meets elsewhere, so that nobody reads an address of the dead attempt
    place = meeting_point.format(attempt=attempt)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    net, optimizer = make_problem()
    checkpoint, step = Path(folder, "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model, data = DistributedDataParallel(net), batches(rank)
    while step < steps:
        train_step(model, optimizer, next(data))
        step += 1
        report("step", step=step, generation=attempt + 1, member=rank, pid=os.getpid())
        if rank == 0 and step % 10 == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # whole or not at all
        time.sleep(0.01)
    dist.destroy_process_group()
    end_process()


# %% [markdown]
# To start it, write it to a file, as you would, and call torchrun.
#
# On one machine both the agent and the ranks can meet in a file, so that nothing listens on the
# network. On several machines you pass `--rdzv-endpoint=HOST:PORT`, and `env://` as the meeting
# point. Keep the environment variable there: without it, all attempts share one store, and a new
# attempt can read addresses of the dead one.


# %%
def start_torchrun(folder: str, ranks: int) -> subprocess.Popen:
    program = Path(folder, "train.py")
    start = "import json\nimport sys\n\ntrain_from_checkpoint(**json.loads(sys.argv[1]))\n"
    program.write_text(program_of(train_from_checkpoint) + start)
    place = f"file://{folder}/ranks-{{attempt}}"
    arguments = {"folder": folder, "meeting_point": place, "steps": 60}
    options = f"--nnodes=1 --nproc-per-node={ranks} --max-restarts=1 --local-addr=127.0.0.1"
    meeting = f"--rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-endpoint={folder}/agents"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options.split(), *meeting.split()]
        + ["--rdzv-id=lesson", f"--log-dir={folder}/logs", str(program), json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # the variable keeps the agent from opening a store of its own, on all network interfaces
        env={
            **loopback,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )


# %%
def kill_during(process: subprocess.Popen, rank: int, step: int) -> tuple[list[dict], float]:
    """Kill `rank` when it reports `step`. Returns all reports, and when the kill was."""
    reports, log, killed_at = [], [], 0.0
    limit = threading.Timer(60, process.terminate)  # the agent then ends its ranks
    limit.start()
    try:
        for line in process.stdout:
            text, *entries = line.split("\x1e")  # three ranks share this pipe: expect mixed lines
            log.append(text)
            for entry in (json.JSONDecoder().raw_decode(entry)[0] for entry in entries):
                reports.append(entry)
                if not killed_at and (entry["member"], entry["step"]) == (rank, step):
                    killed_at = time.monotonic()
                    os.kill(entry["pid"], signal.SIGKILL)
    finally:
        limit.cancel()
        process.terminate()
    if process.wait() != 0:
        raise RuntimeError("torchrun failed:\n" + "".join(log)[-3000:])
    return reports, killed_at


# %%
with tempfile.TemporaryDirectory(prefix="restart-") as folder, start_torchrun(folder, 3) as agent:
    restarted, restart_killed_at = kill_during(agent, rank=1, step=37)
costs["restart"] = cost([r for r in restarted if r["member"] != 1], restart_killed_at, 2)
pids = {
    generation: {r["pid"] for r in restarted if r["generation"] == generation}
    for generation in (1, 2)
}
print("processes that live on after the restart:", len(pids[1] & pids[2]))
assert not pids[1] & pids[2]

# %% [markdown]
# No process survived, healthy or not. Now all ways in one table.

# %% tags=["claim"] claim="rebuild-no-restart" table="recovery"
print(f"{'way':22}{'seconds':>8}{'steps redone':>14}")
for way, (seconds, redone) in sorted(costs.items(), key=lambda item: item[1]):
    print(f"{way:22}{seconds:8.2f}{redone:14}")
swift = {way: costs[way][0] for way in ("in place", "new group")}
assert costs["restart"][0] > 3 * max(swift.values()), "a restart is slower than either"
assert costs["restart"][1] > 0, "and it does steps again"
assert max(swift.values()) - min(swift.values()) < costs["restart"][0] / 3, "these are alike"

# %%
fig, ax = plt.subplots(figsize=(7, 2.9))
bars = [
    ("in place", "in place", PALE_GREEN, ""),
    ("new group", "new group", PALE_GREEN, ""),
    ("stays", "in place, stays", PALE_ORANGE, "//"),
    ("keeps the error", "in place,\nkeeps the error", PALE_ORANGE, "//"),
    ("restart", "torchrun restart", PALE_BLUE, ".."),
]
for way, label, colour, hatch in bars:
    seconds, redone = costs[way]
    ax.barh(label, seconds, color=colour, hatch=hatch, edgecolor=INK)
    ax.annotate(f" {seconds:.2f} s, {redone} steps redone", (seconds, label), va="center")
ax.invert_yaxis()
ax.margins(x=0.45)
ax.set_xlabel("seconds from the SIGKILL to the next step of the last survivor")
show(
    fig,
    alt="Bars of recovery time. In place and a new group are tiny and alike, the two ways with a "
    "forgotten precaution take the group's timeout, the restart takes seconds and redoes steps.",
)


# %% [markdown]
# This is the honest result:
#
# - In place and a new group are of the same order. Which of them wins changes from run to run. **In
#   place is not a faster way to connect.**
# - A restart pays for process starts and imports, and for the steps since the last checkpoint. With
#   a real model it also pays for loading data, warming caches and compiling.
# - A forgotten precaution costs as much as you set the timeout to.
#
# | | in place | new group | restart |
# |---|---|---|---|
# | processes of the survivors | live on | live on | start anew |
# | the group object, and who holds it | stays valid | everyone needs the new one | starts anew |
# | references to the group object | harmless | keep the sockets open | none |
# | state of model and optimizer | you align it | you align it | from the checkpoint |
# | API | private, unstable | public | public |
#
# So choose in place when many parts of your program hold the group, or when a process is expensive
# to start. Choose a new group when you can reach all holders. And keep the checkpoints: they help
# when the machine with the store dies, and in-place recovery does not.

# %% [markdown]
# ## On real hardware
#
# Everything above ran on a CPU, with Gloo, over loopback.
#
# On GPUs the `nccl2` backend, also new in 2.14, implements the same three calls. How you notice a
# loss differs there, because GPU collectives run asynchronously: the call itself need not raise.
# The cell below repeats the first experiment where there are GPUs. It was not run for this page.


# %%
def shrink_on_gpus() -> None:
    store, member, world_size = next(dist.rendezvous("env://"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl2",
        store=store,
        rank=member,
        world_size=world_size,
        device_id=device,  # without it, ranks may pick the same GPU
        enable_reconfigure=True,
    )
    for uuid, members in [(1, [0, 1, 2]), (2, [2, 0])]:
        if member in members:
            store.set(f"handle/{uuid}/{member}", dist._get_reconfigure_handle())
            handles = [store.get(f"handle/{uuid}/{other}").decode() for other in members]
            dist._reconfigure(uuid, handles).wait()
            total = torch.tensor([10.0**member], device=device)
            dist.all_reduce(total)
            print(f"uuid {uuid}: member {member}, sum {total.item():g}")
    leave_together(store, world_size)


# %% tags=["hardware"] hardware="cuda"
if torch.cuda.device_count() < 3:
    print("skipped: nccl2 needs one CUDA GPU per rank, three in all, and this machine has fewer")
else:
    run_ranks(shrink_on_gpus, 3)


# %% [markdown]
# ### Several machines
#
# The functions of this lesson take all they know about the job from the environment, so they run
# unchanged under torchrun or any other launcher. Put the cells from *The problem* to *The loop*
# into `train.py`, end it with `train_through_faults(steps=1000, wait_seconds=30.0)`, and run on
# every machine:
#
# ```bash
# torchrun --nnodes=4 --nproc-per-node=1 --rdzv-backend=c10d \
#   --rdzv-endpoint=first-machine:29400 train.py
# ```
#
# Three things to know before you do:
#
# - **The store must outlive every loss.** With this command it lives in torchrun's own process on
#   one of the machines. Use one that you trust most, or a launcher that hosts the store elsewhere.
# - **torchrun ends the neighbours.** When a rank dies, the torchrun on *its* machine ends all ranks
#   of that machine. In-place recovery then serves the other machines. So give each part that can
#   fail alone its own torchrun, as the command does. When the job was done,
#   the remaining torchruns still waited for the lost one a minute later: end them yourself.
# - **Gloo must find the right network.** Set `GLOO_SOCKET_IFNAME` to the interface between the
#   machines.
#
# This was tried with three torchruns of one rank each on one machine, one rank killed: the other
# two ranks went on to the end. It was not tried on several machines.

# %% [markdown]
# ## Your turn
#
# ### Exercise: the furthest becomes rank 0
#
# Many programs log, save and broadcast from rank 0. After a loss you can make sure that rank 0 is
# the member whose state is the truth.
#
# Write `rank_order(steps)`. It gets a dictionary from member to finished steps, and returns the
# members in the order in which you would list their handles: a furthest member first, of several
# the smallest number, then the others in ascending order.


# %% tags=["exercise"] exercise="furthest-first" difficulty=1 minutes=5
def rank_order(steps: dict[int, int]) -> list[int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# The position in the list of handles becomes the rank. Find the one member that goes first, then
# append the rest.


# %% tags=["solution"]
def rank_order(steps: dict[int, int]) -> list[int]:
    furthest = max(steps.values())
    first = min(member for member, step in steps.items() if step == furthest)
    return [first, *sorted(member for member in steps if member != first)]


# %% tags=["check"]
assert rank_order({0: 30, 1: 31, 3: 30}) == [1, 0, 3]
assert rank_order({3: 31, 0: 30, 1: 31}) == [1, 0, 3], "of several the smallest number"
assert rank_order({4: 7}) == [4]
assert rank_order({5: 2, 2: 2, 9: 2}) == [2, 5, 9]
print("furthest-first: correct")


# %% [markdown]
# ### Exercise: keep the global batch
#
# The learning rate was tuned for a batch of 64 over all ranks. With four ranks each takes 16 rows.
# After a loss three are left, and 64 is not a multiple of three. DDP weighs every rank the same, no
# matter how many rows it had, so a plain mean on each rank is wrong.
#
# Write `my_rows`, the slice of the global batch for one rank, as even as can be. Write
# `local_loss`, from this rank's squared errors, such that DDP's average of the gradients is exactly
# that of the mean over all 64 rows.


# %% tags=["exercise"] exercise="keep-global-batch" difficulty=2 minutes=10
def my_rows(global_batch: int, rank: int, world_size: int) -> slice:
    raise NotImplementedError


def local_loss(squared_errors: torch.Tensor, global_batch: int, world_size: int) -> torch.Tensor:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# DDP sums over the ranks and divides by `world_size`. Undo that division, and divide the **sum** of
# your errors by the number that counts. For the rows: where does rank `r` begin, and where does
# rank `r + 1`?


# %% tags=["solution"]
def my_rows(global_batch: int, rank: int, world_size: int) -> slice:
    return slice(rank * global_batch // world_size, (rank + 1) * global_batch // world_size)


def local_loss(squared_errors: torch.Tensor, global_batch: int, world_size: int) -> torch.Tensor:
    return squared_errors.sum() * world_size / global_batch


# %% tags=["check"]
def averaged_gradient(world_size: int, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What DDP would compute: the mean over ranks of the gradient of each rank's loss."""
    gradients = []
    for rank in range(world_size):
        errors = (rows[my_rows(len(rows), rank, world_size)] @ weights).square()
        loss = local_loss(errors, len(rows), world_size)
        gradients.append(torch.autograd.grad(loss, weights)[0])
    return torch.stack(gradients).mean(0)


rows = torch.randn(64, 5, generator=torch.Generator().manual_seed(2))
weights = torch.ones(5, requires_grad=True)
whole = torch.autograd.grad((rows @ weights).square().mean(), weights)[0]
for world_size in (1, 3, 4, 7):
    cuts = [my_rows(64, rank, world_size) for rank in range(world_size)]
    sizes = [len(rows[cut]) for cut in cuts]
    assert sum(sizes) == 64 and max(sizes) - min(sizes) <= 1, f"uneven shares: {sizes}"
    torch.testing.assert_close(averaged_gradient(world_size, weights, rows), whole)
print("keep-global-batch: correct")


# %% [markdown]
# ### Exercise: admit a replacement
#
# A group can grow the same way. Below, members 0 and 1 train. Member 2 starts late, puts its card
# for generation 2 into the store, and waits in the roll call. The others look for the card after
# each step, and rebuild when it is there.
#
# That look is the delicate part. A rebuild is a collective: all members must begin it after the
# **same** step. But stores answer late. Here member 1 sees every card five looks later than
# member 0.
#
# Write `newcomer_waits`. Every member calls it after each step. It must return `True` only when the
# card is there, and the same answer on all members. The next two cells are the late look and the
# loop.


# %%
def late_look(store: dist.Store, looks: int) -> Callable[[str], bool]:
    """A look into the store that finds a card only after it was there for some looks."""
    found = []

    def sees(card: str) -> bool:
        found.extend([True] * store.check([card]))
        return len(found) > looks

    return sees


# %%
def train_and_admit() -> None:
    store, member = connect(10.0)
    net, optimizer = make_problem()
    sees, data = late_look(store, 5 * member), batches(member)
    generation, step, last, stale = 2 if member == 2 else 1, 0, 10**6, True
    while step < last:
        if stale:
            crew = [0, 1, 2][: generation + 1]
            rebuild(store, generation, member, crew, enough=len(crew))
            step, stale = adopt_furthest(net, optimizer, step), False
            model, last = DistributedDataParallel(net), step + 20 if generation == 2 else last
        train_step(model, optimizer, next(data))
        step += 1
        report("step", step=step, generation=generation)
        time.sleep(0.01)
        if generation == 1 and newcomer_waits(sees, "2/card/2"):
            generation, stale = 2, True
    report("end", step=step, size=dist.get_world_size(), weights=sum_of_weights(net))
    leave_together(store, 3)


# %% [markdown]
# Now the one function that the loop lacks.

# %% tags=["exercise"] exercise="admit-replacement" difficulty=3 minutes=15
# write it as a function in place of the dots:
#     def newcomer_waits(sees: Callable[[str], bool], card: str) -> bool:
# `sees(card)` tells whether this member sees the card already
newcomer_waits = ...


# %% [markdown] tags=["hint"]
# Members that must agree can let one of them decide. How does its answer reach the others in the
# same step, without the store?


# %% tags=["solution"]
def newcomer_waits(sees: Callable[[str], bool], card: str) -> bool:
    """`sees(card)` tells whether this member sees the card already."""
    answer = torch.tensor([dist.get_rank() == 0 and sees(card)])
    dist.broadcast(answer, group_src=0)
    return bool(answer)


# %% tags=["check"]
assert callable(newcomer_waits), "write the function first"
grown = run_ranks(train_and_admit, 3, start_after={2: '"step": 20'}, quiet=True, timeout=50.0)
ends = grown.events("end").values()
assert [(end["size"], end["step"]) for end in ends] == [(3, next(iter(ends))["step"])] * 3
assert len({end["weights"] for end in ends}) == 1, "all three hold the same weights"
first_step = next(r["step"] for r in grown.reports[2] if r["event"] == "step")
assert first_step > 20, "the replacement goes on from the others' step"
print("the replacement took over at step", first_step)
print("admit-replacement: correct")

# %% [markdown] tags=["instructor"]
# The third exercise has a tempting answer, `return sees(card)`.
#
# Ask: what does member 0 do while member 1 has not seen the card? It leaves, and member 1 gets an
# error in the middle of a step. The check makes the stores disagree on purpose, because on one
# machine the race is rare. A second answer, `all_reduce` of all looks with a maximum, is right as
# well. Plan 30 minutes for all three.

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# What does `dist._reconfigure` do for you when a rank dies?
#
# - [ ] It notices the loss and rebuilds the group on its own.
#   > No. Your loop notices, by an error in a collective, and every survivor makes the call.
# - [ ] It connects the survivors and restores model and optimizer.
#   > Half of it. State is yours: that is what `adopt_furthest` is for.
# - [x] It connects exactly the processes whose handles you list.
#   > Right. Who they are, and what state they are in, is your part.

# %% [markdown] tags=["quiz"]
# Why does each survivor first rebuild a group in which it is alone?
#
# - [x] It closes its sockets to the others, so that those who noticed nothing get an error now.
#   > Right. Without it they wait for the whole timeout of the group.
# - [ ] The uuid of the failed group must be released.
#   > A uuid is never released. Every rebuild takes a new one.
# - [ ] It resets the gradients.
#   > Gradients are tensors of the model. The group knows nothing about them.

# %% [markdown] tags=["quiz"]
# After a rebuild you go on with the old DDP object. What do you see?
#
# - [ ] A `RuntimeError` in the next backward pass.
#   > That would be kind. The run above raised nothing.
# - [x] No error, and one step with a gradient that is too small.
#   > Right: divided by the size of the group that died.
# - [ ] Nothing wrong, as DDP follows the group.
#   > It uses the group's connections, but its divisor comes from before the loss.

# %% [markdown] tags=["quiz"] multi=true
# Which of these make a survivor hold on to old sockets? Tick all.
#
# - [x] A list `errors` to which the loop appends each exception object.
#   > Yes. Its traceback holds the failed operation. Append `str(error)`.
# - [x] The call to `rebuild` inside the `except` block.
#   > Yes. Inside the block the error is alive.
# - [ ] A second name for `dist.group.WORLD`, when you rebuild in place.
#   > No. The object stays, and its connections are swapped inside. For a *new group* it would
#   > matter.
# - [ ] A copy of the weights.
#   > No. Tensors hold no sockets.

# %% [markdown] tags=["quiz"]
# Your colleague wants in-place rebuilds "because they are much faster than a new group". What do
# you say?
#
# - [ ] Yes, no connections have to be made.
#   > All connections are made anew in both cases.
# - [x] Not faster. It keeps the group object valid, and like a new group it saves the restart.
#   > Right. Look at the table once more.
# - [ ] Yes, but only with many ranks.
#   > Nothing here showed that. Measure on your machines before you claim it.
