# ---
# jupyter:
#   course:
#     title: "Grow back: take in a replacement and hand it the state"
#     summary: A job loses a rank, goes on, and takes in a new one without a restart or a lost sample.
#     minutes: 40
#     level: deeper
#     objectives:
#       - Admit a replacement only when it is ready, and measure what that saves.
#       - Hand over weights, optimizer and position in the data from the member that is furthest.
#       - Wrap the network anew on all ranks, and show what happens to the gradients otherwise.
#       - Lift an elastic loop of about sixty lines into your own job, and launch it.
#       - Save a tensor from some ranks and load it on another number of ranks.
#     prerequisites: [distributed/rebuild-in-place]
#     features:
#       c10d-fault-tolerance: runs
#       checkpointable-tensor: runs
#       torchrun-completion: inspect
#     keypoints:
#       - A replacement knocks when it has loaded everything. Before that nobody waits for it.
#       - All members must decide at the same step, so one decides and broadcasts.
#       - Hand over four things, which are weights, optimizer, step, and position in the data.
#       - After each change, wrap the network in a new DDP object on all ranks, old and new.
#       - Cut the data by its position, not by a sampler per rank, and no sample is lost or repeated.
#       - State that only the dead rank held comes from a checkpoint, and may need other cuts.
#     sources:
#       - title: PyTorch 2.14 release blog, Fault-Tolerant Collectives in c10d
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #186298, the reconfigure interfaces"
#         url: https://github.com/pytorch/pytorch/pull/186298
#       - title: "PR #187381, reconfigure for Gloo"
#         url: https://github.com/pytorch/pytorch/pull/187381
#       - title: "PR #189492, the CheckpointableTensor protocol"
#         url: https://github.com/pytorch/pytorch/pull/189492
#       - title: "PR #191289, shell completion for torchrun"
#         url: https://github.com/pytorch/pytorch/pull/191289
#     moved_in_215: >-
#       The entry points are still private in 2.15.0. Nothing else was compared.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import importlib
import json
import os
import sys
import tempfile
import time
from datetime import timedelta

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.protocol import CheckpointableTensor
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

from course.kit import (
    INK,
    PALE_ORANGE,
    draw_timeline,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()


# %% [markdown]
# [Rebuild in place](rebuild-in-place.py) ends with a smaller group. This lesson is about the way
# back: a new machine arrives, and the job takes it in while it trains. You build a class of about
# sixty lines that does both, and a hand-over that loses nothing.
#
# > [!NOTE]
# > The release text calls this feature **API Unstable**: names and behaviour may change in any
# > later release, without a deprecation. `_reconfigure` and `_get_reconfigure_handle` are private
# > too. Pin the version of torch where you depend on them.
#
# The words, once more. A **rank** is a process of the group, and its number in it. The number may
# change at each rebuild, so each process has a **member** number that stays. A **handle** is the text
# that says how to reach a process. A **store** is a key-value server that all can reach. DDP, short for
# `DistributedDataParallel`, averages gradients.

# %% [markdown]
# ## The problem: who waits for whom?
#
# A rebuild is a collective act: all members call it, and all wait until the last one has. A
# replacement has a lot to do before it can: start Python, import torch, read the model, open the data.
# If the others begin the rebuild when the new machine *appears*, they wait for all of that.
#
# So the new one should **knock when it is ready**. You will measure the difference. First, the class.

# %% [markdown]
# ## A group that shrinks and grows
#
# The three parts below belong to one class, `Elastic`. Opening the group comes first. A process that
# is started again gets the RANK of the dead one from its launcher. The dead one's number must not
# come back, though: its cards are still in the store. So the store counts who has come. (In the runs
# of this page the newcomer has a RANK of its own; with torchrun, at the end, it gets the old one.)


# %%
class Group:
    """A process group whose connections can be made anew."""

    def __init__(self, timeout: float) -> None:
        self.store, rank, size = next(dist.rendezvous("env://"))
        came_before = self.store.add(f"came/{rank}", 1) > 1
        self.me = size + self.store.add("extra", 1) if came_before else rank
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=size, timeout=limit,
            enable_reconfigure=True,
        )  # fmt: skip
        self.generation, self.members, self.admitted = 0, [], 0

    def rebuild(self, generation: int, candidates: list[int], enough: int) -> None:
        """Connect the candidates that answer. Ends this process if it is not among them."""
        alone = [dist._get_reconfigure_handle()]
        dist._reconfigure(1000 * generation + 1 + self.me, alone).wait()  # closes old sockets
        self.members = self.roll_call(generation, candidates, enough)
        self.generation = generation
        cards = [self.store.get(f"{generation}/card/{member}") for member in self.members]
        dist._reconfigure(1000 * generation, [card.decode() for card in cards]).wait()

    def roll_call(self, generation: int, candidates: list[int], enough: int) -> list[int]:
        """The members of this generation: the first complete list that reaches the store."""
        self.store.set(f"{generation}/card/{self.me}", dist._get_reconfigure_handle())
        present, end = [], time.monotonic() + 10.0
        while len(present) < enough and time.monotonic() < end:
            time.sleep(0.002)
            present = [m for m in candidates if self.store.check([f"{generation}/card/{m}"])]
        law = self.store.compare_set(f"{generation}/members", "", json.dumps(present))
        if self.me not in json.loads(law):
            raise SystemExit(f"member {self.me} came too late for generation {generation}")
        return json.loads(law)


# %% [markdown]
# You know these steps: leave alone, put a card into the store, wait until enough cards are there,
# let the first complete list be the law. The second part uses them for the three events in the life of
# a group: it is founded, it loses a member, it takes one in.


# %%
class Elastic(Group):
    """A group that goes on without the dead and takes in the new."""

    def found(self, founders: int) -> None:
        """Called once by each of the first members."""
        self.rebuild(1, list(range(founders)), founders)

    def shrink(self) -> None:
        """After an error in a collective, outside of its except block."""
        self.rebuild(self.generation + 1, self.members, len(self.members) - 1)

    def knock(self) -> None:
        """Called by a newcomer, once it has loaded everything."""
        place = self.store.add("knocks", 1) - 1
        self.store.set(f"knock/{place}", str(self.me))

    def enter(self) -> None:
        """Called by a newcomer after its knock. Returns when it is a member."""
        *plan, self.admitted = json.loads(self.store.get(f"invitation/{self.me}"))  # waits
        self.rebuild(*plan)

    def grow(self) -> bool:
        """Called by all members between two steps. True if somebody was taken in."""
        newcomer = torch.tensor([-1])
        if dist.get_rank() == 0 and self.store.add("knocks", 0) > self.admitted:
            newcomer[0] = int(self.store.get(f"knock/{self.admitted}"))
        dist.broadcast(newcomer, group_src=0)  # all decide the same, at the same step
        if newcomer < 0:
            return False
        self.admitted += 1
        plan = [self.generation + 1, [*self.members, int(newcomer)], len(self.members) + 1]
        if dist.get_rank() == 0:
            self.store.set(f"invitation/{int(newcomer)}", json.dumps([*plan, self.admitted]))
        self.rebuild(*plan)
        return True


# %% [markdown]
# Look at `grow`. Each member could look into the store by itself, and each would see the knock at
# another moment. Then one rebuilds while another starts a step, and both wait for nothing. So rank 0
# looks, and a small `broadcast` makes its answer everybody's. It costs one small collective for each
# step. If that is too much, call `grow` in each tenth step only, on all ranks alike.
#
# And if the newcomer dies between knock and rebuild? Its card never comes, the roll call ends when its
# time is over (10 s in `roll_call`), and the others go on. Until then they stand still: the reason
# for the last exercise.

# %% [markdown]
# ## What must be handed over
#
# A process that joins has fresh weights and knows nothing. Four things make it a full member: the
# **weights**, the state of the **optimizer**, the **step**, and the **position in the data**.
#
# The last one is forgotten most often. The usual sampler for each rank divides the data by the number
# of ranks, and that number just changed. So keep one number for the whole job: how many samples all
# ranks together have seen. Each step takes the next block of samples, and each rank its part of it.


# %%
ROWS = 16  # samples for each rank and step


def make_problem(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network and its optimizer. A newcomer makes it with another seed."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def samples(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples with the numbers `first` to `first + ROWS - 1`, the same on every rank."""
    inputs = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(first))
    return inputs, inputs.sum(1, keepdim=True).tanh()


# %% [markdown]
# `hand_over` asks everybody for the step, and sends all state from the one who is furthest. After a
# loss survivors can be one step apart, so it serves both events. `group_src` is the rank in the group
# as it is now. `weights_only=True`, new in 2.14, keeps the exchange of objects safe.


# %%
def hand_over(net: nn.Module, optimizer: torch.optim.Optimizer, at: dict[str, int]) -> None:
    """Give everybody the weights, optimizer state and progress `at` of the furthest member."""
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, at["step"], weights_only=True)
    state = [{"net": net.state_dict(), "optimizer": optimizer.state_dict(), "at": at}]
    dist.broadcast_object_list(state, group_src=steps.index(max(steps)), weights_only=True)
    net.load_state_dict(state[0]["net"])
    optimizer.load_state_dict(state[0]["optimizer"])
    at.update(state[0]["at"])


# %% [markdown]
# Three helpers finish the parts: one step of training, which cuts the data by position; a step without a
# peer, to warm up; and the end, where nobody hangs up while a slower peer needs the connection.


# %%
def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, at: dict[str, int]) -> None:
    """Train on the next block of samples. `at["seen"]` counts those of all ranks together."""
    inputs, targets = samples(at["seen"] + ROWS * dist.get_rank())
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()  # DDP averages the gradients between the ranks here
    optimizer.step()
    report("step", loss=loss.item(), size=dist.get_world_size(), **at)
    at["seen"] += ROWS * dist.get_world_size()
    at["step"] += 1
    time.sleep(0.01)  # stands for the work of a larger model


def warm_up(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on zeros, without a peer: what is imported or built at first use, is there then."""
    net(torch.zeros(ROWS, 32)).sum().backward()
    optimizer.step()
    importlib.import_module("torch.distributed.nn.functional")  # DDP imports it at first use


def leave_together(group: Group) -> None:
    """End this process when all members are done. No Python shutdown: Gloo may still be busy."""
    group.store.add("done", 1)
    while group.store.add("done", 0) < len(group.members):
        time.sleep(0.01)
    sys.stdout.flush()
    os._exit(0)


# %% [markdown]
# ## The loop
#
# The loop has one rule: after any change of the group, hand over and wrap anew. The `except` block
# only takes a note. The recovery happens in the next turn, when the error object is gone.
#
# Look at the line with `grow`. A newcomer has just entered, so its `changed` is true, and Python does
# not call `grow` then. That matters: the others have *left* `grow` at this point, and one more call
# on one side only would hang the job.


# %%
def train_elastic(founders: int, full: int, load_seconds: float, knock_early: bool) -> None:
    group = Elastic(timeout=20.0)
    report("begin")
    if group.me < founders:
        net, optimizer = make_problem(seed=group.me)
        group.found(founders)
    else:
        net, optimizer = join_late(group, load_seconds, knock_early)
    at, changed, lost = {"step": 0, "seen": 0, "goal": 1}, True, False
    while at["step"] < at["goal"]:
        try:
            if lost:
                group.shrink()
            changed = changed or lost or group.grow()
            if changed:
                hand_over(net, optimizer, at)
                model, changed, lost = DistributedDataParallel(net), False, False
                whole = dist.get_world_size() == full
                at["goal"] = at["step"] + 40 if whole else 10**9  # the end of this lesson's job
                report("rebuilt", size=dist.get_world_size(), **at)
            one_step(model, optimizer, at)
        except RuntimeError as error:
            report("noticed", text=str(error), **at)
            lost = True
    report("end", weights=sum_of_weights(net), **at)
    leave_together(group)


# %%
def join_late(
    group: Elastic, load_seconds: float, knock_early: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Load, then knock. Or the other way round, to see what that costs."""
    if knock_early:
        group.knock()
    net, optimizer = make_problem(seed=group.me)
    warm_up(net, optimizer)
    time.sleep(load_seconds)  # stands for reading the model and opening the data
    if not knock_early:
        group.knock()
    report("ready")
    group.enter()
    return net, optimizer


def sum_of_weights(net: nn.Module) -> float:
    """One number for all weights: ranks with the same weights get the same number."""
    return float(sum(weight.detach().double().sum() for weight in net.parameters()))


# %% [markdown]
# Now the whole story: three members train, member 2 gets a SIGKILL when it reports step 30, and
# somebody starts a replacement as soon as the loss is noticed. It needs two seconds to load.

# %%
LOAD_SECONDS = 2.0
story = run_ranks(
    train_elastic,
    4,
    kill={2: '"step": 30'},
    start_after={3: '"noticed"'},
    quiet=True,
    founders=3,
    full=3,
    load_seconds=LOAD_SECONDS,
    knock_early=False,
)
print("exit codes:", story.exit_codes)
for member, end in story.events("end").items():
    print(f"member {member}: {end['step']} steps, weights {end['weights']:.12f}")

# %% tags=["claim"] claim="qa-recovery-state"
ends = story.events("end")
assert sorted(ends) == [0, 1, 3] and story.exit_codes[2] == -9
assert len({end["weights"] for end in ends.values()}) == 1, "the same weights, to the last bit"
first_of_new = next(r for r in story.reports[3] if r["event"] == "step")
print("the replacement's first step:", first_of_new["step"])
assert first_of_new["step"] > 30, "it goes on where the others are"

# %% [markdown]
# ## Look inside
#
# Zero is the SIGKILL. The replacement appears some time later, since a new process has to be started
# and to import torch. Its loading is drawn in full. Nobody waits for it.


# %%
def spans_of(member: int, reports: list[dict], zero: float) -> list[tuple[int, float, float, str]]:
    """What one rank did, as (rank, start, end, what), in seconds after `zero`."""
    names = {"begin": "loading", "ready": "changing", "rebuilt": "training", "noticed": "changing"}
    spans, what, since = [], None, 0.0
    for entry in reports:
        if entry["event"] in names or entry is reports[-1]:
            if what:
                spans.append((member, since - zero, entry["at"] - zero, what))
            what, since = names.get(entry["event"]), entry["at"]
    return spans


def draw_story(ax: plt.Axes, run, zero: float, left: float) -> None:
    spans = [span for m, reports in enumerate(run.reports) for span in spans_of(m, reports, zero)]
    spans = [(m, max(start, left), end, what) for m, start, end, what in spans if end > left]
    marks = [(member, at - zero, "SIGKILL") for member, at in run.killed_at.items()]
    draw_timeline(ax, spans, marks)


# %%
fig, ax = plt.subplots(figsize=(7, 3))
draw_story(ax, story, story.killed_at[2], left=-0.4)
ax.set_xlabel("seconds after the SIGKILL")
show(
    fig,
    alt="Timeline of four ranks. Rank 2 ends at zero with a SIGKILL. Ranks 0 and 1 train on without a "
    "visible gap. Rank 3 begins later, loads for two seconds, and then trains with them.",
)

# %% [markdown]
# The changes of the group are too short to be seen at this scale. And the data? Walk through the
# steps that the final weights contain, in order, and see whether each begins where the one before
# ended.

# %%
kept = {}
for entry in sorted((r for m in (0, 1) for r in story.reports[m]), key=lambda r: r["at"]):
    if entry["event"] == "step":
        kept[entry["step"]] = entry  # a step that was done again replaces the first try
position, sizes = 0, []
for step in range(len(kept)):
    assert kept[step]["seen"] == position, "no sample lost, none used twice"
    position += ROWS * kept[step]["size"]
    sizes.append(kept[step]["size"])
changes = [(step, size) for step, size in enumerate(sizes) if step == 0 or sizes[step - 1] != size]
print("size of the group, from step:", dict(changes))
assert [size for _, size in changes] == [3, 2, 3]
assert position == ends[0]["seen"]

# %% [markdown]
# Each step begins where the one before ended, over both changes. Note what did change: with two ranks
# a step has fewer samples, so the batch is smaller for a while. If your learning rate depends on it,
# *Rebuild in place* has an exercise on that.

# %% [markdown]
# ## Measure it: knock early, or when ready
#
# The same newcomer, without a loss before it, but now it knocks *before* it loads.

# %% table="pause"
early = run_ranks(
    train_elastic,
    3,
    start_after={2: '"step": 20'},
    quiet=True,
    founders=2,
    full=3,
    load_seconds=LOAD_SECONDS,
    knock_early=True,
)


def pause_at_growth(run, size: int) -> float:
    """The longest time between two steps of member 0 while the group grows to `size`, in seconds."""
    steps = [r for r in run.reports[0] if r["event"] == "step"]
    pairs = zip(steps, steps[1:], strict=False)
    return max(b["at"] - a["at"] for a, b in pairs if a["size"] < b["size"] == size)


pauses = {"early": pause_at_growth(early, 3), "when ready": pause_at_growth(story, 3)}
print(f"{'knock':14}seconds the others pause")
for knock, seconds in pauses.items():
    print(f"{knock:14}{seconds:.2f}")
assert pauses["early"] > 0.9 * LOAD_SECONDS, "they waited for the loading"
assert pauses["when ready"] < pauses["early"] / 2

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.4, 2.6), sharex=True, layout="constrained")
for ax, run, name in zip(axes, (early, story), pauses, strict=True):
    newcomer = max(member for member, reports in enumerate(run.reports) if reports)
    entered = next(r["at"] for r in run.reports[newcomer] if r["event"] == "rebuilt")
    steps = [r["at"] - entered for r in run.reports[0] if r["event"] == "step"]
    steps = [at for at in steps if -3 < at < 0.4]
    ax.eventplot(steps, colors=INK, linewidths=0.7)
    loading = (-LOAD_SECONDS, 0.0)
    ax.axvspan(*loading, ymin=0.04, ymax=0.16, facecolor=PALE_ORANGE, hatch="//", edgecolor=INK)
    ax.set(title=f"knock {name}", yticks=[], xlabel="seconds, 0: it is a member", xlim=(-3, 0.4))
show(
    fig,
    alt="Steps of rank 0 as thin lines over time, with a hatched bar for the loading of the newcomer. "
    "Knocking early, there is no step during the loading. Knocking when ready, steps go on.",
)

# %% [markdown]
# Each thin line is a step of member 0, and the hatched bar marks about when the newcomer loads. The
# gap is longer than the bar: imports and the warm-up count, too. With
# a real model, loading takes minutes, and all machines of the job would wait for one.

# %% [markdown]
# ## Break it: keep the old DDP object
#
# `DistributedDataParallel(net)` on all ranks after each change looks wasteful. DDP even has a private
# method that swaps the group in an object, `_update_process_group`. Try it: the survivors update
# theirs, and the newcomer makes a new one that skips the first synchronisation (`init_sync=False`), as
# it has been handed the weights.
#
# `gradient_error` compares DDP's gradient with the true mean over all ranks. 0 is perfect, 1 means
# that the error is as large as the gradient.


# %%
def gradient_error(model: nn.Module, net: nn.Module, inputs: torch.Tensor) -> float:
    """The largest relative error of DDP's averaged gradient over all weights."""
    net.zero_grad()
    model(inputs).square().mean().backward()
    own = torch.autograd.grad(net(inputs).square().mean(), list(net.parameters()))
    worst = 0.0
    for weight, gradient in zip(net.parameters(), own, strict=True):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        worst = max(worst, float((weight.grad - gradient).abs().max() / gradient.abs().max()))
    return worst


# %% [markdown]
# Two founders train two equal networks for some steps. Then member 2 joins, and gets the weights of
# both. One network follows the first way, one the second.


# %%
def two_ways() -> None:
    group = Elastic(timeout=10.0)
    nets = {way: make_problem(seed=group.me)[0] for way in ("update", "new on all ranks")}
    draw, models = torch.Generator().manual_seed(group.me), {}
    if group.me < 2:
        group.found(2)
        models = {way: DistributedDataParallel(net) for way, net in nets.items()}
        for _ in range(5):
            train_all(models, nets, draw, "before")
        while not group.grow():
            time.sleep(0.02)
    else:
        group.knock()
        group.enter()
    for way, net in nets.items():
        for weight in net.parameters():
            dist.broadcast(weight.detach(), group_src=0)
        if way == "update" and models:
            models[way]._update_process_group(dist.group.WORLD)
        else:
            models[way] = DistributedDataParallel(net, init_sync=way != "update")
    for _ in range(3):
        train_all(models, nets, draw, "after")
    leave_together(group)


# %%
def train_all(models: dict, nets: dict, draw: torch.Generator, when: str) -> None:
    """One step of each network, with plain gradient descent."""
    inputs = torch.randn(ROWS, 32, generator=draw)
    for way, model in models.items():
        error = gradient_error(model, nets[way], inputs)
        with torch.no_grad():
            for weight in nets[way].parameters():
                weight -= 0.05 * weight.grad
        report("trained", way=way, when=when, error=error, weights=sum_of_weights(nets[way]))


ways_run = run_ranks(two_ways, 3, quiet=True)
trained = [
    (member, entry)
    for member, reports in enumerate(ways_run.reports)
    for entry in reports
    if entry["event"] == "trained" and entry["when"] == "after"
]

# %%
verdict = {}
for way in ("update", "new on all ranks"):
    errors = [e["error"] for member, e in trained if e["way"] == way and member == 0]
    last = {m: e["weights"] for m, e in trained if e["way"] == way}
    verdict[way] = (errors, len(set(last.values())) == 1)
    print(f"{way:17} error of three steps:", " ".join(f"{error:.2%}" for error in errors))
    print(f"{'':17} weights afterwards equal on all ranks: {verdict[way][1]}")
assert max(verdict["new on all ranks"][0]) < 1e-4 and verdict["new on all ranks"][1]
assert verdict["update"][0][0] > 0.5, "the first step is wrong"
assert max(verdict["update"][0][1:]) < 1e-4, "the later ones look healthy"
assert not verdict["update"][1], "and the weights are not the same any more"

# %% [markdown]
# With `_update_process_group` one step is wrong, no error is raised, and from then on the ranks train
# **different** networks. The loss will not tell you.
#
# The likely reason: DDP sends gradients in buckets, and after its first step it sorts the buckets anew,
# in the order in which gradients arrive. The survivors have done that, the newcomer has not. Both
# buckets have the same length, so the sum goes through, and adds values of different weights.
#
# A new DDP object on all ranks costs little: it copies no weights into itself, and makes them equal.
# And check now and then: the sum of the weights, compared over all ranks, would have found this.

# %% [markdown] tags=["instructor"]
# Before the cell with the verdict, let the room vote: which of the two ways is wrong, and will you see
# an error?
#
# Common wrong answer: "the weights were broadcast, so all is well". They *were* equal, for one moment.
# Draw two rows of three boxes on the board, one sorted a-b-c and one c-b-a, and add them up box by box.
# Ten minutes for this section.

# %% [markdown]
# ## State that died with its rank
#
# All of the above works since each rank holds everything. Sharded state is different: an optimizer
# that is split over the ranks loses a part with each dead rank. That part comes from a **checkpoint**,
# and the group that loads it may have another size, so other cuts.
#
# `torch.distributed.checkpoint`, DCP for short, can do that if it knows where a tensor lies in the
# whole. Since 2.14 four attributes on a plain tensor are enough. The protocol is called
# `CheckpointableTensor`.


# %%
def part_of(total: int, rank: int, size: int) -> torch.Tensor:
    """An empty part of a vector with `total` entries, with what DCP must know about it."""
    begin, end = rank * total // size, (rank + 1) * total // size
    part = torch.full((end - begin,), -1.0)
    part.global_shape = (total,)
    part.global_offsets = ((begin,),)  # one entry for each piece that this tensor holds
    part.local_offsets = ((0,),)
    part.local_sizes = ((end - begin,),)
    return part


def save_or_load(folder: str, total: int, save: bool) -> None:
    dist.init_process_group("gloo")
    part = part_of(total, dist.get_rank(), dist.get_world_size())
    assert isinstance(part, CheckpointableTensor)
    if save:
        part.copy_(torch.arange(part.global_offsets[0][0], part.global_offsets[0][0] + len(part)))
        checkpoint.save({"average": part}, checkpoint_id=folder)
    else:
        checkpoint.load({"average": part}, checkpoint_id=folder)
    report("part", values=part.tolist())
    dist.barrier()


# %%
with tempfile.TemporaryDirectory(prefix="grow-back-") as folder:
    cuts = {}
    for ranks, save in ((3, True), (2, False)):
        cut_run = run_ranks(save_or_load, ranks, folder=folder, total=10, save=save, quiet=True)
        cuts[ranks] = [part["values"] for part in cut_run.events("part").values()]
for ranks, parts in cuts.items():
    print(f"{ranks} ranks:", " | ".join(" ".join(f"{value:g}" for value in part) for part in parts))
assert [sum(parts, []) for parts in cuts.values()] == [list(map(float, range(10)))] * 2

# %% [markdown]
# Three ranks saved, two ranks loaded, and each value is at its place. Before 2.14 you had to wrap the
# parts in a DTensor or write a planner of your own.

# %% [markdown]
# ## On real hardware
#
# Everything here ran on a CPU with Gloo. On NVIDIA GPUs, `nccl2` has the same three calls; the last
# section of *Rebuild in place* has a cell for it. The class of this lesson does not care, except that
# a loss there need not raise in the call itself.
#
# ### Several machines
#
# [elastic.py](../../docs/downloads/distributed/elastic.py) is this lesson's loop as one file. It takes all
# it knows about the job from the environment, so any launcher will do:
#
# | launcher | file | what replaces a lost process |
# |---|---|---|
# | torchrun | [torchrun.sh](../../docs/downloads/distributed/torchrun.sh) | the loop in the script, on each machine |
# | Slurm | [job.slurm](../../docs/downloads/distributed/job.slurm) | the loop in each task |
# | Kubernetes, Kubeflow Trainer | [trainjob.yaml](../../docs/downloads/distributed/trainjob.yaml) | the restart policy of the pod |
#
# Each process is its own torchrun (`--nproc-per-node=1`), since a torchrun ends all of its ranks when
# one of them dies. The store must outlive all losses: the files start it on the first machine, apart
# from the ranks.
#
# The file was tried on three network namespaces of one machine, which have addresses and sockets of
# their own as machines have: one process was killed, started again, and taken in. A test repeats
# that. Slurm and Kubernetes were not tried; a test checks the syntax of their files only.
#
# Typing torchrun's many options is easier since 2.14: it prints a completion for your shell.

# %%
actions = {option: a for a in get_args_parser()._actions for option in a.option_strings}
shells = actions["--print-completion"].choices
print("torchrun --print-completion, for:", ", ".join(shells))
assert "bash" in shells
print("it needs the package shtab:", "shtab" in actions["--print-completion"].help)

# %% [markdown]
# ## Your turn
#
# ### Exercise: the next rows
#
# Real data ends. When all `total` samples were seen, the next **epoch** begins, and the last step of an
# epoch may need some from the next. Write `next_rows(seen, rank, size, total)`: the 16 numbers of the
# samples, in a row and each below `total`, that this rank takes next: first rank 0's, then rank 1's, as
# in `one_step`. `seen` counts over all epochs. You may not need every argument.


# %% tags=["exercise"] exercise="next-rows" difficulty=1 minutes=5
def next_rows(seen: int, rank: int, size: int, total: int) -> list[int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# First find the numbers as if the data had no end. `size` does not appear in that. Then think of a
# clock, where 13 is 1.


# %% tags=["solution"]
def next_rows(seen: int, rank: int, size: int, total: int) -> list[int]:
    first = seen + ROWS * rank
    return [number % total for number in range(first, first + ROWS)]


# %% tags=["check"]
visits, seen = [0] * 100, 0
for size in [4] * 5 + [3] * 20 + [4] * 5:  # a loss, and a replacement
    for rank in range(size):
        for row in next_rows(seen, rank, size, 100):
            assert 0 <= row < 100, f"there is no sample {row}"
            visits[row] += 1
    seen += ROWS * size
assert sum(visits) == seen == 1600
assert set(visits) == {16}, f"each of 100 samples 16 times, but: {sorted(set(visits))}"
assert next_rows(96, 0, 4, 100)[:5] == [96, 97, 98, 99, 0], "rank 0 takes 16 in a row"
assert next_rows(0, 1, 2, 24)[6:10] == [22, 23, 0, 1], "of 24 samples"
print("next-rows: correct")


# %% [markdown]
# ### Exercise: hand over everything
#
# Your job has more state: a schedule for the learning rate, a running average of the weights. All of
# these have `state_dict()` and `load_state_dict()`. Write `hand_over_all(parts, step)`, where `parts`
# maps a name to such an object. Afterwards all ranks hold the state of the rank with the most steps,
# and the function returns that number of steps. Order in the dictionary may differ between ranks.


# %%
def try_hand_over() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, optimizer = make_problem(seed=rank)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(3 + 4 * (rank == 1)):  # rank 1 is ahead
        net(torch.randn(ROWS, 32)).square().mean().backward()
        optimizer.step()
        schedule.step()
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule}
    if rank == 2:
        parts = dict(reversed(parts.items()))
    step = hand_over_all(parts, schedule.last_epoch)
    momentum = sum(float(s["momentum_buffer"].sum()) for s in optimizer.state.values())
    rates = [schedule.get_last_lr()[0], optimizer.param_groups[0]["lr"], schedule.last_epoch]
    report("state", step=step, state=[sum_of_weights(net), momentum, *rates])
    dist.barrier()


# %% [markdown]
# Three ranks will call it in that program. Now the function that it lacks.


# %% tags=["exercise"] exercise="hand-over-all" difficulty=2 minutes=10
# write it as a function in place of the dots:
#     def hand_over_all(parts: dict[str, object], step: int) -> int:
hand_over_all = ...


# %% [markdown] tags=["hint"]
# `hand_over` above does it for two parts. One object can carry all states if it is a dictionary from
# name to state. Load by name. If a rank fails, its peers fail too: look for the error that is *not*
# "Connection closed".


# %% tags=["solution"]
def hand_over_all(parts: dict[str, object], step: int) -> int:
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step, weights_only=True)
    states = [{name: part.state_dict() for name, part in parts.items()}]
    dist.broadcast_object_list(states, group_src=steps.index(max(steps)), weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(states[0][name])
    return max(steps)


# %% tags=["check"]
assert callable(hand_over_all), "write the function first"
states = run_ranks(try_hand_over, 3, quiet=True, timeout=40.0).events("state").values()
assert [s["step"] for s in states] == [7, 7, 7], "the steps of the furthest"
assert len({tuple(s["state"]) for s in states}) == 1, "all hold the same state"
*_, shown_rate, used_rate, epoch = next(iter(states))["state"]
assert shown_rate == used_rate == 0.05 * 0.5**3 and epoch == 7, "that of rank 1"
print("hand-over-all: correct")


# %% [markdown]
# ### Exercise: spares that are alive
#
# To make recovery fast, keep **spares**: processes that are loaded and wait at the door. But a spare
# may die while it waits. If you admit a dead one, the roll call runs into its limit, and all wait.
#
# So each spare raises its counter in the store once a second. Rank 0 reads all counters now and then.
# Write `alive(memory, counters, now, patience)`: the spares, ascending, whose counter has been seen to
# change within the last `patience` seconds. `memory` is a dictionary that you may fill as you like; it
# is empty at the first call. A spare that is seen for the first time counts as changed; whether one
# that left and came back does is up to you. `now` is the
# clock of *this* machine, in seconds. You get no clock of the others: it could be wrong by minutes.


# %% tags=["exercise"] exercise="spares-alive" difficulty=3 minutes=12
def alive(memory: dict, counters: dict[int, int], now: float, patience: float) -> list[int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# What you need to remember for each spare: the counter that you saw, and when *you* first saw that
# value. A spare that was started again may begin at a lower counter: that is a change, too.


# %% tags=["solution"]
def alive(memory: dict, counters: dict[int, int], now: float, patience: float) -> list[int]:
    for spare, counter in counters.items():
        if spare not in memory or memory[spare][0] != counter:
            memory[spare] = (counter, now)
    return sorted(spare for spare in counters if now - memory[spare][1] <= patience)


# %% tags=["check"]
memory: dict = {}
assert alive(memory, {}, 0.0, 3.0) == []
assert alive(memory, {7: 100, 5: 1}, 10.0, 3.0) == [5, 7], "both are new, and 5 comes first"
assert alive(memory, {7: 101, 5: 1}, 12.0, 3.0) == [5, 7], "5 was seen to change 2 s ago"
assert alive(memory, {7: 101, 5: 1}, 14.0, 3.0) == [7], "5 has been silent for 4 s"
assert alive(memory, {7: 101, 5: 2}, 16.0, 3.0) == [5], "5 is back, 7 has been silent"
assert alive(memory, {7: 3, 5: 2}, 17.0, 3.0) == [5, 7], "7 was started again"
assert alive(memory, {5: 2}, 18.0, 3.0) == [5], "7 has left"
assert alive(memory, {5: 2}, 18.0, 1.0) == [], "too long for this patience"
assert alive({}, {5: 2}, 50.0, 1.0) == [5], "another memory, another door"
print("spares-alive: correct")

# %% [markdown] tags=["instructor"]
# The third exercise hides a habit: people store a time stamp in the store and compare it with their
# own clock.
#
# Ask what happens when the clocks of two machines differ by a minute. The signature gives no foreign
# clock on purpose. Plan 25 minutes for all three.

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# When should a replacement tell the others that it is there?
#
# - [ ] As soon as its process runs, so that no time is lost.
#   > Then all others wait for its imports and its loading.
# - [x] When it could do a step in the next moment.
#   > Right. Until then the others train.
# - [ ] Never: the group notices new processes.
#   > A group notices nothing. Somebody must look into the store.

# %% [markdown] tags=["quiz"]
# Each member looks for the knock by itself, without a broadcast. What can happen?
#
# - [ ] Nothing, they all read the same store.
#   > They read it at different moments.
# - [x] One rebuilds while another begins a step, and both wait for each other.
#   > Right. All must decide the same at the same step.
# - [ ] The newcomer is taken in twice.
#   > Its card would be used once. The problem is the members, not the newcomer.

# %% [markdown] tags=["quiz"]
# After growing, survivors call `_update_process_group`, and the newcomer makes a new DDP object. What
# do you see?
#
# - [ ] A `RuntimeError`, as the buckets do not fit.
#   > They have the same length, so the sum goes through.
# - [ ] Nothing wrong.
#   > The loss looks fine. Compare the weights of two ranks.
# - [x] One wrong step without an error, and different weights from then on.
#   > Right. Wrap anew on all ranks.

# %% [markdown] tags=["quiz"] multi=true
# What must a newcomer be given? Tick all.
#
# - [x] The weights and the state of the optimizer.
#   > Yes. Momentum is state, too.
# - [x] The position in the data.
#   > Yes, or it trains on samples that were used already.
# - [ ] The DDP object of a survivor.
#   > That belongs to its process. Everybody makes a new one.
# - [ ] The uuid of the last rebuild, to use it again.
#   > A uuid is used once. It needs the number of the *next* generation.
