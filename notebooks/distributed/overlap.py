# ---
# jupyter:
#   course:
#     title: "Compute while the network works: overlap in compiled code"
#     summary: >-
#       Read from the generated code whether a collective overlaps with computation, measure it with
#       a late peer, and rewrite code in which nothing can move.
#     minutes: 35
#     level: core
#     objectives:
#       - Read the order of kernels, collectives and waits in the code that Inductor generates.
#       - Predict what the overlap pass moves, and where it must stop.
#       - Measure the gain with a fair baseline and a late peer.
#       - Rewrite a function so that there is work to do while the network works.
#     prerequisites: [distributed/compile-once]
#     job: {function: clock, ranks: 2, arguments: {late: 0.2, takes: 0.1}}
#     features:
#       inductor-simple-overlap-default: runs
#       pipeline-presplit-inputs: runs
#       cp-balanced-docs: runs
#       imp-manual-overlap-ddp: stand-in
#       imp-pipeline-comms: inspect
#     keypoints:
#       - A collective has a start and a wait. What stands between them costs no time of its own.
#       - The pass moves starts up and waits down, place by place. Computation stays in order.
#       - A wait stops before the first step that reads its result, and before another wait.
#       - A start does not move up if that raises the peak of memory, as a large all_gather may.
#       - Count the kernels in flight in the generated code. The count is free of noise.
#       - Compare compiled with compiled. Eager overlaps as you wrote it, so it is another program.
#       - To the pass, your own operator is computation, also if it communicates.
#     sources:
#       - title: PyTorch 2.14 release blog, overlap on by default in Inductor
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #184235, the simple_overlap pass"
#         url: https://github.com/pytorch/pytorch/pull/184235
#         date: 2026-05-18
#       - title: "PR #184240, simple_overlap on by default"
#         url: https://github.com/pytorch/pytorch/pull/184240
#         date: 2026-05-18
#       - title: "Issue #189454, communication that the pass does not see"
#         url: https://github.com/pytorch/pytorch/issues/189454
#         date: 2026-07-09
#       - title: "PR #189729, a proposal to turn the pass off again"
#         url: https://github.com/pytorch/pytorch/pull/189729
#         date: 2026-07-13
#       - title: "PR #188472, all_reduce in the manual overlap"
#         url: https://github.com/pytorch/pytorch/pull/188472
#         date: 2026-06-29
#       - title: "PR #188500, microbatches that are split already"
#         url: https://github.com/pytorch/pytorch/pull/188500
#         date: 2026-06-30
#       - title: "PR #186173, one communicator per direction of a pipeline"
#         url: https://github.com/pytorch/pytorch/pull/186173
#       - title: "PR #189902, balanced packed documents"
#         url: https://github.com/pytorch/pytorch/pull/189902
#         date: 2026-07-14
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. There was a proposal to turn the pass off until
#       it sees custom operators that communicate. The cell that asserts the default, and the one
#       with the custom operator, tell you what your version does.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import logging
import re
import time
from collections.abc import Callable
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch._inductor.comms
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.config
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.kit import (
    INK,
    PALE_BLUE,
    PALE_ORANGE,
    PALE_RED,
    expect_error,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()
SWITCH = "aten_distributed_optimizations.enable_simple_overlap"

# %% [markdown]
# Your ranks exchange gradients, and while they do, the processor idles. But often there is work
# that does not need these gradients yet. If it runs in between, the network costs nothing.
#
# Since PyTorch 2.14, `torch.compile` arranges this for you. In this lesson you read from the
# generated code what it did, put a clock on it, and find the cases in which it can do nothing.
#
# > [!WARNING]
# > The release marks it **API Unstable**: it may change without a deprecation period. The switch,
# > the functional collectives and the helpers that show generated code are private names.

# %% [markdown]
# ## The problem: a wait in the wrong place
#
# In compiled code, a **collective** (an operation that all ranks do together, such as `all_reduce`)
# has two steps. The *start* hands the tensor to the network and returns. The *wait* blocks until
# the result is there. Only what runs between the two overlaps with the network.
#
# Here is such a function. It looks like a piece of a backward pass: one product is reduced over the
# ranks, and three more products do not depend on the result.


# %%
def reduce_and_go_on(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    reduced = fc.all_reduce(x @ b, "sum", dist.group.WORLD)
    return reduced, x @ a @ a @ a


# %% [markdown]
# You can see the order without a network. The `fake` backend, from PyTorch's own tests (private),
# pretends that there are two ranks. `steps_of` compiles a function and lists the calls that the
# generated code makes, each with the tensor that it returns or else first names.


# %%
CALL = re.compile(  # a kernel of a library, one that Inductor wrote, or an operator
    r"(?:(buf\d+) = )?(extern_kernels|(?:cpp|triton)_\w+|torch\.ops\.\w+)"
    r"(?:\.(?!run)(\w+))?[\w.]*\("
)
STARTS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def steps_of(function: Callable, *inputs: torch.Tensor, **config: bool) -> list[tuple[str, str]]:
    """The kernels, collectives and waits in the generated code, in order, each with a tensor."""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"fx_graph_cache": False, **config}):
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    steps = []
    for line in map(str.strip, code.splitlines()):
        if call := CALL.match(line):
            made, group, name = call.groups()
            first = re.search(r"\b(?:buf|arg)\d+", line[call.end() :])
            steps.append((name or group, made or (first[0] if first else "")))
    return steps


# %%
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
torch.manual_seed(0)
inputs = [torch.randn(64, 64) for _ in range(3)]
off = steps_of(reduce_and_go_on, *inputs, **{SWITCH: False})
print(" -> ".join(name for name, _ in off))
assert [name for name, _ in off] == ["mm", "all_reduce_", "wait_tensor", "mm", "mm", "mm"]

# %% [markdown]
# This is 2.14.1 with the new pass off. The wait follows its start at once. Three products come
# after it, and none of them needs the result. (The `_` in `all_reduce_` says that Inductor reduces
# in place.)
#
# ## The smallest thing that works: do nothing
#
# The pass is called `simple_overlap`, and it is on unless you turn it off.

# %% tags=["claim"] claim="article-simple-overlap"
assert torch._inductor.config.aten_distributed_optimizations.enable_simple_overlap is True
on = steps_of(reduce_and_go_on, *inputs)  # nothing is set
print(" -> ".join(name for name, _ in on))
assert [name for name, _ in on] == ["mm", "all_reduce_", "mm", "mm", "mm", "wait_tensor"]
assert sorted(name for name, _ in on) == sorted(name for name, _ in off)

# %% [markdown]
# The same six steps, with the wait at the end. The three products now run while the network works.
#
# ## Look inside
#
# Draw both orders. The upper row of each pair is the processor, the lower one the network.

# %%
LOOKS = {"kernel": (PALE_BLUE, ""), "network": (PALE_ORANGE, "//"), "wait": (PALE_RED, "xx")}


def draw_order(ax: plt.Axes, title: str, steps: list[tuple[str, str]]) -> None:
    """One box for each step of the processor, and the span of each collective below."""
    starts = {}
    for place, (name, tensor) in enumerate(steps):
        if "all_reduce" in name:
            starts[tensor] = place
        colour, hatch = LOOKS["wait" if "wait" in name else "kernel"]
        label = {"all_reduce_": "start", "wait_tensor": "wait"}.get(name, name)
        ax.barh(1, 0.9, left=place, height=0.7, color=colour, hatch=hatch, edgecolor=INK)
        ax.text(place + 0.45, 1, label, ha="center", va="center", backgroundcolor=colour)
        if "wait" in name:
            start, (colour, hatch) = starts[tensor] + 0.9, LOOKS["network"]
            ax.barh(0, place + 0.9 - start, left=start, height=0.5, color=colour, hatch=hatch)
    ax.set(title=title, xlim=(0, len(steps)), xticks=[])
    ax.set_yticks([0, 1], ["network", "processor"])


# %%
fig, axes = plt.subplots(2, 1, figsize=(7.0, 3.6), layout="constrained")
draw_order(axes[0], "pass off", off)
draw_order(axes[1], "pass on", on)
axes[1].set_xlabel("order in the generated code (not time)")
show(
    fig,
    alt="Two rows of steps. With the pass off: mm, start, wait, then three mm; the network is busy "
    "between start and wait only. With it on, the three mm stand between start and wait.",
)

# %% [markdown]
# The rule is short. It is in `torch/_inductor/comms.py`, in a function of the same name:
#
# 1. Each start moves up, past one step at a time. It stops at a step that makes its input, or at
#    another collective.
# 2. Then each wait moves down. It stops at a step that reads its result, or at another wait.
# 3. No move may raise the peak of memory.
#
# The pass knows no run times and moves nothing else: kernels keep their order. It logs what it did.


# %%
def log_of(function: Callable, *inputs: torch.Tensor) -> list[str]:
    """What the pass says about `function`."""
    logger, lines = logging.getLogger("torch._inductor.comms"), []
    with mock.patch.object(logger, "info", lambda text, *values: lines.append(text % values)):
        steps_of(function, *inputs)
    return lines


print(log_of(reduce_and_go_on, *inputs))
assert "moved 0 collectives, 1 waits" in log_of(reduce_and_go_on, *inputs)[0]

# %% [markdown]
# In your job, `TORCH_LOGS=inductor` shows this line, but not if the code came from the compile
# cache. Zero collectives were moved, since Inductor had put the start early already.
#
# A number that you can test is better than a picture: how many kernels run while a collective is in
# flight?


# %%
def in_flight(steps: list[tuple[str, str]]) -> list[int]:
    """For each collective, how many kernels stand between its start and its wait."""
    counts: dict[str, int] = {}
    flying: set[str] = set()
    for name, tensor in steps:
        if name.startswith(STARTS):
            counts[tensor] = 0
            flying.add(tensor)
        elif name == "wait_tensor":
            flying.discard(tensor)
        else:
            counts.update({start: counts[start] + 1 for start in flying})
    return list(counts.values())


print("kernels in flight: off", in_flight(off), "on", in_flight(on))
assert in_flight(off) == [0] and in_flight(on) == [3]

# %% [markdown]
# Two collectives, as in the backward pass of two layers. The gradient of a layer is reduced while
# the layer below is still being computed.


# %%
def two_layers(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    upper = fc.all_reduce(x.t() @ b, "sum", dist.group.WORLD)
    delta = b @ a
    lower = fc.all_reduce(x.t() @ delta, "sum", dist.group.WORLD)
    return upper, lower, x.t() @ (delta @ a)


for active in (False, True):
    steps = steps_of(two_layers, *inputs, **{SWITCH: active})
    print(in_flight(steps), " ".join(name for name, _ in steps))
assert in_flight(steps) == [4, 2]

# %% [markdown]
# ## Break it: nothing moves
#
# Now the result is read at once. This is what a linear layer does whose parts are spread over the
# ranks: the next layer needs the sum.


# %%
def read_at_once(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    scaled = fc.all_reduce(x @ b, "sum", dist.group.WORLD) @ a
    h = x @ a @ a @ a
    return scaled @ h


stuck = {active: steps_of(read_at_once, *inputs, **{SWITCH: active}) for active in (False, True)}
print(" -> ".join(name for name, _ in stuck[True]))
assert stuck[True] == stuck[False] and in_flight(stuck[True]) == [0]
assert log_of(read_at_once, *inputs) == []

# %% [markdown]
# There are three products that could run in between, and the pass leaves them where they are. It
# moves the wait, and the wait must stand before its reader. The reader is a kernel, and kernels do
# not move. An empty log is the sign. In the exercises you repair this function.
#
# ## Break it: memory comes first
#
# An `all_gather` collects the parts of all ranks into a new tensor. If it starts early, this tensor
# exists early. Here it could start before all else, as its input is an argument:


# %%
def compute_then_gather(x: torch.Tensor, a: torch.Tensor, part: torch.Tensor):
    return x @ a @ a, fc.all_gather_tensor(part, 0, dist.group.WORLD)


x, a, part = inputs
held = steps_of(compute_then_gather, x, a, part)
peak_check = "_calculate_potential_peak_memory_reorder"
check = getattr(torch._inductor.comms, peak_check)
with mock.patch.object(torch._inductor.comms, peak_check, lambda *args: (0, check(*args)[1])):
    freed = steps_of(compute_then_gather, x, a, part)
for name, steps in (("as it is", held), ("without the check of memory", freed)):
    print(f"{name:28}", " -> ".join(name for name, _ in steps))
assert in_flight(held) == [0] and in_flight(freed) == [2]
assert in_flight(steps_of(compute_then_gather, x, a, part[:2])) == [2]  # a small tensor

# %% [markdown]
# The gather is exposed, though two products could hide it: the peak would rise. The second run
# cheats: it reports every peak as zero. The last line shows that a small tensor may start early.
#
# ## Break it: communication that the pass does not see
#
# The pass keeps the order of *its* collectives. Your own operator is a kernel to it, even if that
# operator talks to other ranks. This one does not; it stands for one that does.


# %%
@torch.library.custom_op("course::exchange", mutates_args=())
def exchange(x: torch.Tensor) -> torch.Tensor:
    """Stands for an operator of yours that communicates."""
    return x.clone()


@exchange.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def reduce_then_exchange(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    return fc.all_reduce(x @ b, "sum", dist.group.WORLD), exchange(x)


for active in (False, True):
    crossed = [name for name, _ in steps_of(reduce_then_exchange, *inputs, **{SWITCH: active})]
    print("pass on: " if active else "pass off:", " -> ".join(crossed))
assert crossed.index("exchange") < crossed.index("wait_tensor")

# %% [markdown]
# With the pass on, your exchange begins while the `all_reduce` is in flight. If both use the
# network in an order that the other ranks rely on, that can be a hang. Issue #189454 reports one,
# with blocking sends and receives: there the pass moved the receive above the send.
#
# There are two ways out. Turn the pass off, or give the operator a result of the collective as an
# input, so that the wait must come first:


# %%
def exchange_after(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    reduced = fc.all_reduce(x @ b, "sum", dist.group.WORLD)
    return reduced, exchange(reduced)


ordered = [name for name, _ in steps_of(exchange_after, *inputs)]
print(" -> ".join(ordered))
assert ordered.index("wait_tensor") < ordered.index("exchange")
dist.destroy_process_group()

# %% [markdown]
# ## Measure it: a late peer
#
# On one machine the network is memory, and too fast to see. So make it slow in the way that is
# common in practice: one rank comes late. Rank 1 sleeps for 0.2 s before it joins, and rank 0 is
# timed.
#
# The computation is an operator that takes 0.1 s and no processor, as a kernel on a GPU would. You
# run it twice. So the clock does not depend on how busy your machine is. There are two functions,
# which differ only in the line where you write the collective, and three ways to run each.


# %%
def clock(late: float, takes: float) -> None:
    @torch.library.custom_op("course::work", mutates_args=())
    def work(x: torch.Tensor) -> torch.Tensor:
        time.sleep(takes)
        return x + 1

    work.register_fake(torch.empty_like)

    def start_first(x):
        reduced = fc.all_reduce(x @ x, "sum", dist.group.WORLD)
        return reduced, work(work(x))

    def start_last(x):
        h = work(work(x))
        return fc.all_reduce(x @ x, "sum", dist.group.WORLD), h

    dist.init_process_group("gloo")
    x = torch.randn(64, 64)
    for function in (start_first, start_last):
        for mode in ("eager", "off", "on"):
            torch._dynamo.reset()
            run = function if mode == "eager" else torch.compile(function, fullgraph=True)
            with torch._inductor.config.patch({SWITCH: mode == "on"}):
                report(f"{mode} {function.__name__}", seconds=timed(run, x, late))
    dist.destroy_process_group()


# %%
def timed(function: Callable, x: torch.Tensor, late: float, repeats: int = 5) -> list[float]:
    """Seconds until both results are there, if rank 1 comes `late` seconds late."""
    seconds = []
    function(x)  # the first call connects, or compiles
    for _ in range(repeats):
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(late)
        began = time.perf_counter()
        reduced, _ = function(x)
        reduced.sum().item()  # eager has not waited yet: the first use waits
        seconds.append(time.perf_counter() - began)
    return seconds


clocked = run_ranks(clock, 2, late=0.2, takes=0.1, timeout=150, quiet=True)

# %%
best: dict[tuple[str, str], float] = {}
print("rank 0, ms (best and worst of 5)   start_first   start_last")
for mode in ("eager", "off", "on"):
    cells = []
    for name in ("start_first", "start_last"):
        seconds = clocked.events(f"{mode} {name}")[0]["seconds"]
        best[mode, name] = min(seconds)
        cells.append(f"{1e3 * min(seconds):5.0f}-{1e3 * max(seconds):<5.0f}")
    print(f"{mode:32} ", "   ".join(cells))
for name in ("start_first", "start_last"):
    assert best["on", name] < 0.75 * best["off", name]
assert best["eager", "start_first"] < 0.75 * best["eager", "start_last"]

# %% [markdown]
# With the pass off, the lateness and the work add up. With it on, they overlap, wherever you wrote
# the collective.
#
# And eager? It overlaps, too, if you wrote the collective first, since a functional collective in
# eager mode waits when its result is first used. If you wrote it last, it cannot. So eager measures
# *your* order, the compiler has its own, and the difference between the two says nothing about the
# pass.
#
# > [!TIP]
# > Compare compiled with compiled: the same function, switch off and on. And make sure that your
# > clock runs until the result is there. Without the line with `sum()`, eager would look better
# > than it is.

# %% [markdown]
# ## Also new: four neighbours
#
# **Manual overlap** is another scheduler, for people who know their model: you name the modules,
# and it merges the collectives of each into one *bucket*. New is that it takes `all_reduce`, as DDP
# and HSDP use it. It is private. It asks the GPU for its speed, so the cell replaces that question.

# %%
from torch._inductor.fx_passes import overlap_manual_scheduling, overlap_scheduling
from torch.fx.experimental.proxy_tensor import make_fx

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def two_gradients(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    return [fc.all_reduce(x.t() @ w, "sum", dist.group.WORLD) for w in (a, b)]


graph = make_fx(two_gradients, tracing_mode="fake")(*inputs)
before = graph.code.count("all_reduce.default(")
with mock.patch.object(overlap_scheduling, "gather_node_runtime_estimations", return_value={}):
    bucketed = overlap_manual_scheduling.manual_overlap_bucketing(
        graph, ["layer"], module_stack_fn=lambda node: [("layer", nn.Module)]
    )
after = bucketed.code.count("all_reduce.default(")
print(f"all_reduce calls: {before} before, {after} after")
assert (before, after) == (2, 1)
dist.destroy_process_group()

# %% [markdown]
# **Pipelines** cut a batch into microbatches. You may now pass microbatches that *you* have cut,
# with `arg_mbs`, `kwarg_mbs` and `target_mbs`. That helps if a microbatch comes with something that
# cannot be cut, such as a Python number. Mixing both ways is refused.

# %%
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * factor


schedule = ScheduleGPipe(PipelineStage(Scaled(), 0, 1, torch.device("cpu")), n_microbatches=3)
parts = [(torch.ones(2, 4),) for _ in range(3)]
factors = [{"factor": float(number)} for number in range(3)]
result = schedule.eval(arg_mbs=parts, kwarg_mbs=factors)
print(result[:, 0].tolist())
assert result[:, 0].tolist() == [0, 0, 1, 1, 2, 2]

# %% tags=["raises"]
with expect_error(ValueError, "through arg_mbs"):
    schedule.eval(torch.ones(6, 4), kwarg_mbs=factors)

# %% [markdown]
# A pipeline can also use one communicator for activations and another for gradients, so that the
# two directions do not queue behind each other. Set
# `torch.distributed.config.pipeline_per_direction_p2p`. It needs a group that is bound to a device.
# Here you only see the default and the refusal:

# %% tags=["raises"]
assert torch.distributed.config.pipeline_per_direction_p2p is False
per_direction = torch.distributed.config.patch(pipeline_per_direction_p2p=True)
with per_direction, expect_error(RuntimeError, "No device associated"):
    PipelineStage(Scaled(), 0, 1, torch.device("cpu"))
dist.destroy_process_group()

# %% [markdown]
# **Context parallelism** cuts one long sequence over the ranks. With causal attention, a later
# token has more to read. For packed documents, a balancer (private) gives each rank the head and
# the tail of each document. Before, it listed one document after the other, and a cut in
# equal parts was unfair:

# %%
from torch.distributed.tensor.experimental._context_parallel import _PerDocumentHeadTailLoadBalancer

lengths, ranks = [4, 12], 2
reads = torch.cat([torch.arange(1, length + 1) for length in lengths])  # keys that a token reads
order = _PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu")._generate_indices()[0]
by_document = torch.cat([order[order < 4], order[order >= 4]])  # one document after the other
for name, layout in (("by document", by_document), ("2.14", order)):
    print(f"{name:12} work of the ranks: {[part.sum().item() for part in reads[layout].chunk(2)]}")
first, second = reads[order].chunk(ranks)
assert first.sum() == second.sum()
assert reads[by_document][:8].sum() != reads[by_document][8:].sum()

# %% [markdown]
# ## On the real hardware
#
# On GPUs, a start puts the collective on a stream of its own, and a wait makes the computing stream
# wait. The order matters in the same way. Gloo ran here between two processes; NCCL was not run.
# The next cell shows the order on one NVIDIA GPU.

# %% tags=["hardware"] hardware="cuda"
if torch.cuda.is_available():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    on_gpu = [tensor.cuda() for tensor in inputs]
    for active in (False, True):
        gpu_steps = steps_of(reduce_and_go_on, *on_gpu, **{SWITCH: active})
        print(active, " -> ".join(name for name, _ in gpu_steps))
    dist.destroy_process_group()
else:
    print("skipped: needs an NVIDIA GPU; shows the order of the generated code there")

# %% [markdown] tags=["instructor"]
# Show the order with the pass off, and ask where the wait may go at most. Then the same for
# `read_at_once`: most want to move the product that reads the result.
#
# Common wrong answers: "compiled is no faster than eager, so the pass does nothing" (see the
# clock); "the pass makes the network faster"; "it reorders collectives" (never those it knows).
# Timing: 10 minutes to the drawing, 10 for the breaks, 8 for the clock, 7 to start the exercises.

# %% [markdown]
# ## Your turn
#
# ### Exercise: find the exposed collectives
#
# Write `exposed(steps)` for your test suite. It gets what `steps_of` returns, and returns the
# tensors whose collective has no kernel between start and wait, in the order of their starts.


# %% tags=["exercise"] exercise="exposed" difficulty=1 minutes=6
def exposed(steps: list[tuple[str, str]]) -> list[str]:
    """The tensors whose collective overlaps with no kernel."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# For each start, look at the steps after it, until the wait with the same tensor. Other starts and
# other waits are not kernels.


# %% tags=["solution"]
def exposed(steps: list[tuple[str, str]]) -> list[str]:
    """The tensors whose collective overlaps with no kernel."""
    found = []
    for place, (name, tensor) in enumerate(steps):
        if name.startswith(STARTS):
            end = steps.index(("wait_tensor", tensor), place)
            between = [other for other, _ in steps[place + 1 : end]]
            if all(other.startswith((*STARTS, "wait_tensor")) for other in between):
                found.append(tensor)
    return found


# %% tags=["check"]
two = [("mm", "x"), ("all_reduce_", "g"), ("all_reduce_", "h"), ("wait_tensor", "g"), ("mm", "g")]
assert exposed([*two, ("wait_tensor", "h")]) == ["g"]
assert exposed([("all_gather_into_tensor", "p"), ("wait_tensor", "p")]) == ["p"]
assert exposed(off) == [off[1][1]] and exposed(on) == []
print("exposed: correct")

# %% [markdown]
# ### Exercise: bring the work forward
#
# `read_at_once` has three products to hide the network behind, and the order of its kernels forbids
# it. Write the same function so that at least four kernels are in flight. You may use one
# collective, of `x @ b`, and the result must be the same up to rounding.


# %% tags=["exercise"] exercise="bring-forward" difficulty=2 minutes=10
def read_late(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scaled = fc.all_reduce(x @ b, "sum", dist.group.WORLD) @ a
    h = x @ a @ a @ a
    return scaled @ h


# %% [markdown] tags=["hint"]
# The pass moves a wait up to the first reader. Which product reads the sum first, and does it have
# to? Matrix products may be bracketed in another way.


# %% tags=["solution"]
def read_late(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    reduced = fc.all_reduce(x @ b, "sum", dist.group.WORLD)
    return reduced @ (a @ (x @ a @ a @ a))  # (r a) h = r (a h): only the last product reads it


# %% tags=["check"]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
small = [tensor / 8 for tensor in inputs]
torch.testing.assert_close(read_late(*small), read_at_once(*small), rtol=1e-3, atol=1e-3)
late_steps = steps_of(read_late, *small)
dist.destroy_process_group()
assert [name for name, _ in late_steps].count("all_reduce_") == 1
assert in_flight(late_steps)[0] >= 4, late_steps
print("bring-forward: correct,", in_flight(late_steps), "kernels in flight")

# %% [markdown]
# ### Exercise: nothing else to do
#
# In a chain, everything depends on the sum: `all_reduce(x @ b) @ a`. There is no other work. Still,
# no collective has to be exposed. Write `in_parts(x, a, b)`, which returns a list of tensors that
# stand for the rows of the result from top to bottom. No collective may be exposed, and no product
# may be computed twice.


# %% tags=["exercise"] exercise="in-parts" difficulty=3 minutes=12
def in_parts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [fc.all_reduce(x @ b, "sum", dist.group.WORLD) @ a]


# %% [markdown] tags=["hint"]
# A row of the result needs only one row of `x`. Who could compute while the upper rows travel?


# %% tags=["solution"]
def in_parts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [fc.all_reduce(part @ b, "sum", dist.group.WORLD) @ a for part in x.chunk(2)]


# %% tags=["check"]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
x, a, b = inputs
torch.testing.assert_close(torch.cat([*in_parts(x, a, b)]), x @ b @ a, rtol=1e-3, atol=1e-3)
part_steps = steps_of(in_parts, x, a, b)
dist.destroy_process_group()
counts = in_flight(part_steps)
kernels = [name for name, _ in part_steps].count("mm")
assert counts and min(counts) >= 1 and kernels == 2 * len(counts), part_steps
print("in-parts: correct,", counts, "kernels in flight")

# %% [markdown]
# ## Check yourself

# %% [markdown] tags=["quiz"]
# Which step does the pass never move?
#
# - [ ] The start of a collective.
#   > It moves up, to the step that makes its input, or to another collective.
# - [ ] A wait.
#   > It moves down, to its first reader, or to another wait.
# - [x] A kernel, in relation to other kernels.
#   > That is why an early reader pins the wait.

# %% [markdown] tags=["quiz"]
# Your compiled model is as fast as eager, switch on. What follows for the pass?
#
# - [ ] It does nothing for this model.
#   > Eager may overlap, too.
# - [x] Nothing. Compile with the switch off and compare.
#   > Then the two programs differ only by the pass.
# - [ ] The network is not the bottleneck.
#   > It may be, and be hidden in both.

# %% [markdown] tags=["quiz"]
# The log has no line of `simple_overlap` for a graph with two collectives. What is likely?
#
# - [x] Each result is read right after its start, so no wait can move.
#   > As in `read_at_once`. Bring other work before the reader.
# - [ ] The pass is off, since it is opt-in.
#   > It was, before 2.14. Now it is on by default.
# - [ ] The collectives were merged.
#   > This pass merges nothing.

# %% [markdown] tags=["quiz"]
# Your custom operator sends a tensor to a peer. How do you keep it after a collective's wait?
#
# - [ ] Write it below the collective.
#   > That is no dependency: in the lesson it moved above the wait.
# - [x] Pass a result of the collective to it.
#   > Then it reads that result, and the wait must come first.
# - [ ] Nothing to do: the pass keeps the order of communication.
#   > Of the collectives it knows. Your operator is not one of them.
