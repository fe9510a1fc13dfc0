# ---
# jupyter:
#   course:
#     title: Compile once for all ranks, and find what forbids it
#     summary: Compare the graphs of all ranks on one machine, and make them the same.
#     minutes: 35
#     level: deeper
#     objectives:
#       - Trace a model as any rank of any world, in one process, and compare the graphs.
#       - Say which values of a graph depend on the rank, and what happens if they are wrong.
#       - Switch compile_on_one_rank on, and show that the graphs are now the same.
#       - Tell what the switch does not reach, and rewrite your own code so that it fits.
#     prerequisites: []
#     job: {function: look_up, ranks: 2, arguments: {once: true}}
#     features:
#       compile-on-one-rank: runs
#     keypoints:
#       - A traced graph holds plain numbers. A number that came from the rank makes it that rank's.
#       - Another rank's graph gives wrong numbers and no error.
#       - compile_on_one_rank computes the rank at run time, for what DTensor and the mesh put in.
#       - It does not reach your own dist.get_rank(). Put your rank into a tensor.
#       - In 2.14.1 the kernels are the same on all ranks, but no cache entry was shared here.
#     sources:
#       - title: PyTorch 2.14 release blog, compile-on-one-rank
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#       - title: "PR #186892, one of those behind compile-on-one-rank"
#         url: https://github.com/pytorch/pytorch/pull/186892
#       - title: "PR #188215, one of those behind compile-on-one-rank"
#         url: https://github.com/pytorch/pytorch/pull/188215
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. The last part asserts that one line of the
#       generated code still differs and that no cache entry is shared. Should one of these asserts
#       fail on your version, it has become better than this page says.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import difflib
import tempfile
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch._dynamo.utils
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from course.kit import BLUE, ORANGE, plot_style, report, run_ranks, show

plot_style()

# %% [markdown]
# You compile a model that is spread over many ranks. Each rank traces it, compiles it, and gets
# nearly the same program. With a thousand ranks you pay for a thousand compilations, and you cannot
# ship one artifact to all of them.
#
# PyTorch 2.14 has a switch for this, `torch.compiler.config.compile_on_one_rank`. In this lesson you
# find out what makes the programs differ, and what the switch does about it.
#
# > [!WARNING]
# > The release marks it **API Unstable**: it may change without a deprecation period. It asks for one
# > accelerator device per program. Here you run it on the CPU, with the Gloo backend, where the
# > graphs are the same kind of graphs.

# %% [markdown]
# ## The problem: each rank has its own program
#
# The model is an embedding whose rows are spread over the ranks (`RowwiseParallel`). With 16 rows and
# two ranks, rank 0 holds rows 0 to 7 and rank 1 holds 8 to 15. A rank looks up what it has, puts
# zeros for the rest, and an `all_reduce` adds up the parts.
#
# A **mesh** is an arrangement of ranks; here it is a line.


# %%
def embedding(mesh: DeviceMesh) -> tuple[nn.Module, torch.Tensor]:
    """An embedding spread over the mesh by rows, and ids to look up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 4))
    plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan).requires_grad_(False), torch.tensor([0, 3, 8, 15])


# %% [markdown]
# To see a rank's graph, you need no cluster and not even a second process. The `fake` backend, from
# PyTorch's own tests (a private module), pretends that a world exists and moves nothing. So one
# process can trace as rank 0, and then as rank 1.
#
# `aot_autograd` gives you the graph that a compiler such as Inductor would get.

# %%
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore


def graph_of(build: Callable, rank: int, world: int, once: bool = False) -> str:
    """The traced code of the model that `build(mesh)` makes, as rank `rank` of `world`."""
    codes: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        codes.append(graph.code.strip())
        return graph

    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        model, *inputs = build(init_device_mesh("cpu", (world,)))
        backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
        with torch.compiler.config.patch(compile_on_one_rank=once):
            torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    finally:
        dist.destroy_process_group()
    return codes[0]


# %%
def differences(first: str, second: str) -> list[str]:
    """The lines that differ, marked - and +, without what the compiler only forgets again."""
    lines = difflib.unified_diff(first.splitlines(), second.splitlines(), n=0, lineterm="")
    return [line.partition(";")[0] for line in lines if line[1:].startswith("    ")]


graphs = [graph_of(embedding, rank, 2) for rank in (0, 1)]
print(len(graphs[0].splitlines()), "lines; rank 0 (-) against rank 1 (+):")
print("\n".join(differences(*graphs)))
assert graphs[0] != graphs[1]

# %% [markdown]
# Three lines differ, and only by a number: where this rank's rows begin and end. `lt` and `ge` find
# the ids that are not mine, `sub` turns an id into a row of my part. When the graph was traced, the
# rank was a Python number, so it became a constant.
#
# How many programs is that for a larger world? Count the distinct graphs.


# %%
def distinct(build: Callable, world: int, once: bool = False) -> int:
    """How many different graphs the ranks of a world have."""
    return len({graph_of(build, rank, world, once) for rank in range(world)})


worlds = (2, 4, 8)
without = [distinct(embedding, world) for world in worlds]
print("ranks:   ", worlds)
print("programs:", without)
assert without == list(worlds)

# %% [markdown]
# One program a rank. Not every layer is like that. A linear layer spread by columns has no number in
# it that depends on the rank:


# %%
def column_linear(mesh: DeviceMesh) -> tuple[nn.Module, torch.Tensor]:
    """A linear layer spread over the mesh by columns, and an input."""
    model = nn.Sequential(nn.Linear(8, 8))
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan).requires_grad_(False), torch.ones(2, 8)


print("column-parallel linear, 8 ranks:", distinct(column_linear, 8), "program")
assert distinct(column_linear, 8) == 1

# %% [markdown]
# ## Break it: run another rank's program
#
# What if you shipped rank 0's graph to everybody? Try it with two real processes. The compiler below
# takes the code from rank 0 and runs it on each rank, with that rank's own weights.


# %%
def from_rank_zero(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """A compiler that runs rank 0's code on every rank."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("code", graph.code)
    names = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(store.get("code").decode(), names)
    return lambda *arguments: names["forward"](graph, *arguments)


def look_up(once: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, ids = embedding(init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    wanted = nn.Embedding(16, 4)(ids).detach()
    backend = aot_autograd(fw_compiler=from_rank_zero, inference_compiler=from_rank_zero)
    with torch.compiler.config.patch(compile_on_one_rank=once):
        found = torch.compile(model, backend=backend, fullgraph=True)(ids)
    rows = (found == wanted).all(1).tolist()
    report("looked up", ids=ids.tolist(), right=rows, first=found[:, 0].tolist())
    dist.destroy_process_group()


# %%
run = run_ranks(look_up, 2, once=False, quiet=True)
for rank, event in run.events("looked up").items():
    print(f"rank {rank}: right for ids", dict(zip(event["ids"], event["right"], strict=True)))
    assert not any(event["right"]) and event["first"][2:] == [0.0, 0.0]
print("no error was raised")

# %% [markdown]
# Both processes ended well, with wrong numbers for every id. Rank 1 took itself for rank 0. For ids 0
# and 3, both ranks looked into their own part, and the sum mixed two rows. For ids 8 and 15 neither
# did, and the result is zero.
#
# > [!WARNING]
# > That is why you may not copy compiled artifacts between ranks by hand. Nothing checks whose they
# > are.

# %% [markdown]
# ## The switch
#
# Now trace with `compile_on_one_rank`. The environment variable `TORCH_COMPILE_ON_ONE_RANK=1` does the
# same for a whole job.

# %% tags=["claim"] claim="compile-once-graphs"
graphs_once = [graph_of(embedding, rank, 2, once=True) for rank in (0, 1)]
print("same on both ranks:", graphs_once[0] == graphs_once[1])
assert graphs_once[0] == graphs_once[1]
with_switch = [distinct(embedding, world, once=True) for world in worlds]
print("programs with the switch:", with_switch)
assert with_switch == [1, 1, 1]

# %% [markdown]
# One program, however many ranks. Look at what replaced the numbers:

# %%
for line in graphs_once[0].splitlines():
    if any(word in line for word in ("coordinate", "mul =", "mesh_get", "all_reduce.default")):
        print(line.strip().partition(";")[0])

# %% [markdown]
# - `_runtime_compute_coordinate_on_dim` is an operator that asks at *run time* where this rank stands
#   on the mesh. The result is multiplied by 8, the number of rows a rank holds.
# - `mesh_get_process_group` fetches the group at run time too. Before, its name was in the graph.
#
# Does rank 0's graph now work for everybody? The same experiment as above:

# %%
run = run_ranks(look_up, 2, once=True, quiet=True)
for rank, event in run.events("looked up").items():
    print(f"rank {rank}: right for ids", dict(zip(event["ids"], event["right"], strict=True)))
    assert all(event["right"])

# %%
fig, ax = plt.subplots()
ax.plot(worlds, without, color=ORANGE, marker="o", label="as it was")
ax.plot(worlds, with_switch, color=BLUE, marker="s", ls="--", label="compile_on_one_rank")
ax.set(xlabel="ranks", ylabel="different programs", xticks=worlds, ylim=(0, None))
ax.legend()
show(
    fig,
    alt="Number of different graphs against the number of ranks, 2 to 8. Without the switch there "
    "are as many as ranks. With it there is one.",
)

# %% [markdown]
# ## Break it: what the switch does not reach
#
# The switch covers the values that *PyTorch* puts into a graph: positions on a mesh, process groups,
# device indices. Your own code may ask for the rank as well. Each of these functions adds eight times
# the rank.


# %%
def by_get_rank(mesh: DeviceMesh):
    return (lambda x: x + dist.get_rank() * 8), torch.ones(2)


def by_local_rank(mesh: DeviceMesh):
    return (lambda x: x + mesh.get_local_rank() * 8), torch.ones(2)


def by_tensor(mesh: DeviceMesh):
    rank = torch.tensor(dist.get_rank())  # outside of the compiled function
    return (lambda x, r: x + r * 8), torch.ones(2), rank


for build in (by_get_rank, by_local_rank, by_tensor):
    counts = [distinct(build, 4, once) for once in (False, True)]
    print(
        f"{build.__name__:14} programs on 4 ranks: {counts[0]} without, {counts[1]} with the switch"
    )
print("\n".join(differences(*[graph_of(by_get_rank, rank, 2, once=True) for rank in (0, 1)])))
assert [distinct(b, 4, once=True) for b in (by_get_rank, by_local_rank, by_tensor)] == [4, 4, 1]

# %% [markdown]
# Your rank is a Python number, also with the switch on, and becomes a constant. A tensor is an
# *input* of the graph, and each rank brings its own. So: read the rank once, outside, and keep it in
# a tensor, for example in a buffer of your module.
#
# > [!TIP]
# > `distinct(build, world) == 1` is a test for your own model. It needs no GPU and no second process.

# %% [markdown]
# ## Measure it: is anything compiled less often?
#
# The same graph should mean the same compiled code, and a hit in the compile cache for all ranks but
# the first. Look, with Inductor and two real ranks. Rank 1 waits until rank 0 has compiled, and both
# share one empty cache folder.


# %%
def compile_in_turn() -> None:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.utils import run_and_get_code

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    model, ids = embedding(init_device_mesh("cpu", (2,)))

    def in_turn(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        if dist.get_rank() == 1:
            store.wait(["rank 0 compiled"])
        compiled = compile_fx(graph, inputs)
        store.set("rank 0 compiled", "yes")
        return compiled

    inductor = {"cpp_cache_precompile_headers": False}  # one small kernel does not repay them
    with (
        torch.compiler.config.patch(compile_on_one_rank=True),
        torch._inductor.config.patch(inductor),
    ):
        _, (code,) = run_and_get_code(torch.compile(model, backend=in_turn, fullgraph=True), ids)
    counts = torch._dynamo.utils.counters["inductor"]
    report(
        "compiled", code=code, hits=counts["fxgraph_cache_hit"], misses=counts["fxgraph_cache_miss"]
    )
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TMPDIR": folder}  # nobody has compiled here yet
    compiled = run_ranks(compile_in_turn, 2, timeout=150, env=places, quiet=True).events("compiled")

# %% tags=["claim"] claim="text-compile-on-one-rank"
for rank, event in compiled.items():
    print(f"rank {rank}: cache hits {event['hits']}, misses {event['misses']}")
    assert (event["hits"], event["misses"]) == (0, 1)
lines = [event["code"].splitlines() for event in compiled.values()]
different = [(a, b) for a, b in zip(*lines, strict=True) if a != b]
print(f"{len(lines[0])} lines of generated code, {len(different)} differs:")
print("   ", different[0][0].strip()[:88], "…")
assert len(different) == 1 and "DeviceMesh" in different[0][0]

# %% [markdown]
# The kernels are the same to the last character. One line differs: it holds the mesh, **pickled**, and
# the pickle has this rank's number inside. The number is not used, for the position is computed at run
# time. But a cache compares contents, and so rank 1 missed.
#
# So in 2.14.1, on this machine, the switch gives you one *graph*, and no shared cache entry. Do not
# promise your team a shorter start before you have counted hits on your own job. The counter above
# tells you.

# %% [markdown]
# ## On the real hardware
#
# The release describes the switch for jobs with one accelerator per process. With it, a device such
# as `cuda:3` is traced as `cuda`. On a machine with two GPUs this cell traces on each, and compares.


# %% tags=["hardware"] hardware="cuda"
def graph_on(device: int, once: bool) -> str:
    """The traced code of a function that makes a tensor on GPU `device`."""
    codes = []

    def keep(graph, inputs):
        codes.append(graph.code)
        return graph

    torch._dynamo.reset()
    torch.cuda.set_device(device)
    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    with torch.compiler.config.patch(compile_on_one_rank=once):
        torch.compile(lambda x: x + torch.ones(4, device=x.device), backend=backend)(
            torch.ones(4, device=f"cuda:{device}")
        )
    return codes[0]


if torch.cuda.device_count() > 1:
    for once in (False, True):
        print("switch", once, "same graph on two GPUs:", graph_on(0, once) == graph_on(1, once))
else:
    print("skipped: needs two NVIDIA GPUs; compares the graphs that they trace")

# %% [markdown] tags=["instructor"]
# Before the diff, show the whole graph of rank 0 and ask which lines must differ on rank 1. Most people
# point at the `all_reduce`, which does not.
#
# The wrong look-up is the moment to stop: ask what in their own jobs would notice. (A loss that is a
# little worse, weeks later.)
#
# Common wrong answers: "the switch compiles on rank 0 and sends the result" (it does not send
# anything: it makes the programs equal); "my `if rank == 0` is fine, it only logs" (it is traced, too).
# Timing: 10 minutes to the diff, 8 for the break, 8 for the switch, 9 for the limits and the count.

# %% [markdown]
# ## Your turn
#
# ### Exercise: a check for your test suite
#
# Write `must_be_one_program(build, world)`. It traces `build` for every rank of the world with the
# switch on. If all graphs are the same, it returns their number of lines. If not, it raises
# `AssertionError` with a message that names the two ranks and the first line that differs, as in
# `ranks 0 and 2: add = …`. Compare each rank with rank 0.


# %% tags=["exercise"] exercise="one-program-check" difficulty=1 minutes=8
def must_be_one_program(build: Callable, world: int) -> int:
    """Lines of the one graph of all ranks; AssertionError where there are several graphs."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `graph_of` gives you the text for a rank. `differences` gives the lines; the first of them begins with
# a minus and is rank 0's.


# %% tags=["solution"]
def must_be_one_program(build: Callable, world: int) -> int:
    """Lines of the one graph of all ranks; AssertionError where there are several graphs."""
    first = graph_of(build, 0, world, once=True)
    for rank in range(1, world):
        graph = graph_of(build, rank, world, once=True)
        lines = differences(first, graph) or ["their inputs differ"]
        assert graph == first, f"ranks 0 and {rank}: {lines[0].lstrip('- ')}"
    return len(first.splitlines())


# %% tags=["check"]
def only_rank_two_differs(mesh: DeviceMesh):
    extra = 1 if dist.get_rank() == 2 else 0
    return (lambda x: x * 3 + extra), torch.ones(2)


assert must_be_one_program(embedding, 4) == len(graphs_once[0].splitlines())
assert must_be_one_program(by_tensor, 3) > 0
try:
    must_be_one_program(only_rank_two_differs, 4)
except AssertionError as error:
    message = str(error)
else:
    raise SystemExit("no error for a model that depends on the rank")
assert message.startswith("ranks 0 and 2: ") and "add" in message, message
print("one-program-check: correct,", message)

# %% [markdown]
# ### Exercise: positions without a rank
#
# A long sequence is cut into equal parts, one a rank. Each rank must know the positions of its part in
# the whole sequence. This module works, and has one program a rank. Rewrite it so that there is one
# program for all, and the same positions. Its arguments stay.


# %% tags=["exercise"] exercise="positions" difficulty=2 minutes=8
class Positions(nn.Module):
    """Adds to each element its position in the whole sequence."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = dist.get_rank() * self.part
        return x + torch.arange(start, start + self.part)


# %% [markdown] tags=["hint"]
# Which of the two numbers may be a constant? The length of a part is the same on all ranks. The start
# is not: compute it once in `__init__`, and keep it where the compiler sees an input.


# %% tags=["solution"]
class Positions(nn.Module):
    """Adds to each element its position in the whole sequence."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("start", torch.tensor(dist.get_rank() * part), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(self.part) + self.start


# %% tags=["check"]
for rank in (0, 3):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    positions = Positions(5)(torch.zeros(5)).tolist()
    dist.destroy_process_group()
    assert positions == [rank * 5 + place for place in range(5)], positions
assert distinct(lambda mesh: (Positions(5), torch.zeros(5)), 4, once=True) == 1
print("positions: correct, one program for four ranks")

# %% [markdown]
# ### Exercise: the bias that must be added once
#
# In a linear layer that is spread by rows of its input, every rank computes a part, and an
# `all_reduce` adds the parts. The bias must go in once, so this module adds it on rank 0 only. The `if`
# runs while the graph is traced: some ranks get a graph with an addition, others one without. Make it
# one program for any world. The sum over the ranks must stay as it is, and you may not use another
# collective.


# %% tags=["exercise"] exercise="bias-once" difficulty=3 minutes=12
class PartOfLinear(nn.Module):
    """One rank's part of a linear layer; the sum over the ranks is the layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x @ self.weight
        if dist.get_rank() == 0:
            part = part + self.bias
        return part


# %% [markdown] tags=["hint"]
# A graph without the addition and one with it can only become the same if all ranks add *something*.
# What must ranks other than 0 add? It need not be decided in `forward`.


# %% tags=["solution"]
class PartOfLinear(nn.Module):
    """One rank's part of a linear layer; the sum over the ranks is the layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        mine = bias if dist.get_rank() == 0 else torch.zeros_like(bias)  # decided once, as data
        self.register_buffer("weight", weight)
        self.register_buffer("bias", mine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


# %% tags=["check"]
weight, bias, x = torch.randn(6, 4), torch.randn(4), torch.randn(5, 6)
parts = []
for rank in range(3):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    mine = slice(2 * rank, 2 * rank + 2)
    parts.append(PartOfLinear(weight[mine], bias)(x[:, mine]))
    dist.destroy_process_group()
assert torch.allclose(sum(parts), x @ weight + bias, atol=1e-5)
assert distinct(lambda mesh: (PartOfLinear(weight[:2], bias), x[:, :2]), 3, once=True) == 1
print("bias-once: correct, one program for three ranks")

# %% [markdown]
# ## Check yourself

# %% [markdown] tags=["quiz"]
# What made the embedding's graph different on each rank?
#
# - [ ] Each rank has other weights.
#   > Weights are inputs of the graph. Their values are not in it.
# - [x] The first and last row that the rank holds, as constants.
#   > Three lines, and in each a number that was computed from the rank.
# - [ ] The `all_reduce`, which names the rank.
#   > It names the group, and that is the same for all.

# %% [markdown] tags=["quiz"]
# You copy rank 0's compiled artifact to all ranks, without the switch. What do you see?
#
# - [ ] An error about a wrong rank.
#   > Nothing in the artifact says whose it is.
# - [ ] A hang, since the collectives do not match.
#   > They match: the graphs have the same operators in the same order.
# - [x] Wrong numbers, if a constant depends on the rank.
#   > As in the look-up above: no error, no hang.

# %% [markdown] tags=["quiz"]
# The switch is on, and your model calls `dist.get_rank()` in `forward`. Which holds?
#
# - [ ] The switch turns it into a run-time operator.
#   > It does that for what DTensor and the mesh compute, not for your call.
# - [x] The graph has this rank's number as a constant.
#   > Read the rank outside and pass it as a tensor.
# - [ ] Tracing fails.
#   > It works, and that is the trap.

# %% [markdown] tags=["quiz"]
# How do you learn, without a cluster, whether 512 ranks would share one program?
#
# - [x] Trace as several ranks of a fake world in one process, and compare the graphs.
#   > As `distinct` does. The fake backend moves no data, and tracing needs none.
# - [ ] Run two processes with Gloo and compare the losses.
#   > Equal losses do not show equal graphs.
# - [ ] Look for `cuda:0` in the graph.
#   > A device index is one of the things that differ. A row offset is another.
