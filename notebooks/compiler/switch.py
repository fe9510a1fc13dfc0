# ---
# jupyter:
#   course:
#     title: Branch N ways with switch
#     summary: Replace a tower of cond calls by one switch, route tokens with it, know its limits.
#     minutes: 40
#     level: core
#     objectives:
#       - Choose one of N functions by a tensor, inside one compiled graph.
#       - Count and draw what a branch costs, for switch, for a cond tower and for a cond tree.
#       - Route every token of a batch to its own expert.
#       - Keep an optimizer from moving experts that were not used.
#       - Recognise what switch refuses, and what it accepts but should not.
#     prerequisites: []
#     features:
#       switch-hop: runs
#       hop-input-mutation: runs
#     keypoints:
#       - In 2.14.1 the name is torch._higher_order_ops.switch. It is private.
#       - Pass the index as an integer tensor with one element. With a Python int, an export keeps one branch.
#       - An index outside the branches is clamped to the first or last one, without a word.
#       - Branches that did not run get zero gradients, not None. Adam and AdamW move them.
#       - A branch returns new tensors, with the same shapes and dtypes in every branch.
#       - A program with switch exports, but torch.export.save refuses it. A cond tree can be saved.
#     sources:
#       - title: PyTorch 2.14 release blog, torch.switch Higher-Order Op
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #182902, the switch operator"
#         url: https://github.com/pytorch/pytorch/pull/182902
#       - title: "PyTorch documentation, Control Flow - Switch"
#         url: https://docs.pytorch.org/docs/main/higher_order_ops/switch.html
#       - title: "Issue #175891, the proposal of torch.switch"
#         url: https://github.com/pytorch/pytorch/issues/175891
#       - title: "PR #188315, gradients through switch"
#         url: https://github.com/pytorch/pytorch/pull/188315
#       - title: "PR #188976, switch in Inductor"
#         url: https://github.com/pytorch/pytorch/pull/188976
#       - title: "PR #189028, where the index is clamped"
#         url: https://github.com/pytorch/pytorch/pull/189028
#       - title: "PR #188903, branches that change their inputs"
#         url: https://github.com/pytorch/pytorch/pull/188903
#     moved_in_215: >-
#       Nothing. In 2.15.0 switch is still private, and the file that defines it is the same.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import contextlib
import inspect
import io
import logging
import os
import pickle
import re
import shutil
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import torch
from torch import nn

from course.kit import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_ORANGE,
    RED,
    expect_error,
    plot_style,
    show,
)

plot_style()
# What the compiler writes stays in this folder.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get(
    "TORCHINDUCTOR_CACHE_DIR", str(Path("inductor-cache").resolve())
)


# %% [markdown]
# A model often has to choose: one expert of many, one decoder per language, one filter per mode of
# a sensor. In Python that is `functions[index](x)`. A compiled graph cannot index a Python list
# with a tensor. PyTorch 2.14 has an operator for it, `switch`, and this lesson shows what it saves,
# what it costs, and which of its habits surprise people.
#
# > [!NOTE]
# > The release text calls this feature **API Unstable**: names and behaviour may change in any
# > later release, without a deprecation. In 2.14.1 its import path begins with an underscore, so
# > it is private too. Pin the version of torch where you depend on it.
#
# Two words first. **Dynamo** is the part of `torch.compile` that reads your Python and makes a
# **graph**: a list of operations without Python around them. A **higher-order op** is an operation
# whose arguments include graphs. `torch.cond`, an if-else, is one. `switch` is another.

# %% [markdown]
# ## The problem: one graph for each expert
#
# The stand-in for a model is a list of small layers, the *experts*. A **backend** is what
# `torch.compile` hands its graphs to. This one compiles nothing. It keeps each graph, so that you
# can count and draw them.

# %%
torch.manual_seed(0)
experts = [nn.Linear(8, 8) for _ in range(9)]
x = torch.randn(4, 8)


class Recorder:
    """A backend for torch.compile that keeps each graph, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs.append(graph)
        return graph


# %% [markdown]
# Now index the list with a tensor. `fullgraph=True` asks for one graph, or an error. Dynamo finds a
# way: it reads the value of the tensor, and compiles for this value only.


# %%
def by_list(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return experts[index](x)


list_recorder = Recorder()
compiled_list = torch.compile(by_list, backend=list_recorder, fullgraph=True)
for number in range(8):
    compiled_list(torch.tensor(number), x)
print(f"{len(list_recorder.graphs)} graphs for 8 experts")
assert len(list_recorder.graphs) == 8

# %% [markdown]
# One compilation for each expert that is ever chosen. Dynamo has a limit on that, to protect you
# from programs that compile for ever. The ninth expert exceeds it.

# %% tags=["raises"]
torch._logging.set_logs(dynamo=logging.ERROR)  # the error says it: the log need not, too
with expect_error(torch._dynamo.exc.FailOnRecompileLimitHit):
    compiled_list(torch.tensor(8), x)
print("the limit:", torch._dynamo.config.recompile_limit)
assert torch._dynamo.config.recompile_limit == 8

# %% [markdown]
# ## The way before 2.14: a tower of cond
#
# `torch.cond(condition, yes, no, operands)` keeps both sides in the graph, and picks one when the
# graph runs. The *operands* are the tensors that both sides receive. For N branches you nest it:
# is it the first? If not, is it the second? And so on.

# %%
Branch = Callable[..., torch.Tensor]


def cond_tower(
    index: torch.Tensor, branches: Sequence[Branch], operands: tuple, first: int = 0
) -> torch.Tensor:
    """Run branches[index] by asking for one branch after the other, from `first` on."""
    if first == len(branches) - 1:
        return branches[first](*operands)

    def all_others(*inner: torch.Tensor) -> torch.Tensor:
        return cond_tower(index, branches, inner, first + 1)

    return torch.cond(index == first, branches[first], all_others, operands)


# %%
tower_recorder = Recorder()
compiled_tower = torch.compile(
    lambda index, x: cond_tower(index, experts, (x,)), backend=tower_recorder, fullgraph=True
)
with torch.no_grad():
    for number, expert in enumerate(experts):
        torch.testing.assert_close(compiled_tower(torch.tensor(number), x), expert(x))
print(f"{len(tower_recorder.graphs)} graph for {len(experts)} experts")
assert len(tower_recorder.graphs) == 1

# %% [markdown]
# One graph, and right for every expert. But it is a graph in a graph in a graph. You see the price
# below.

# %% [markdown]
# ## The smallest thing that works
#
# `switch(index, branches, operands)` calls one of the branches with the operands. The index is an
# integer tensor with one element. All branches take the same operands and return the same kind of
# result. The release text writes `torch.switch`. That name does not exist in 2.14.1.

# %% tags=["claim"] claim="switch-public-name,article-switch-name,notes-switch-import"
from torch._higher_order_ops import switch

result = switch(torch.tensor(2), experts, (x,))
torch.testing.assert_close(result, experts[2](x))

print("is there a torch.switch?", hasattr(torch, "switch"))
print("which module does it claim?", switch.__module__)
assert not hasattr(torch, "switch") and switch.__module__ == "torch"

# %% [markdown]
# The function says that it lives in `torch`, which misleads. Import it as above. Now compile it, and
# count graphs once more.


# %% tags=["claim"] claim="switch-one-graph"
def by_switch(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return switch(index, experts, (x,))


recorder = Recorder()
compiled = torch.compile(by_switch, backend=recorder, fullgraph=True)
with torch.no_grad():
    for number, expert in enumerate(experts):
        torch.testing.assert_close(compiled(torch.tensor(number), x), expert(x))
print(f"{len(recorder.graphs)} graph for {len(experts)} experts")
assert len(recorder.graphs) == 1

# %% [markdown]
# Does the graph run all branches and keep one result? A *hook* on each branch's graph counts how
# often it runs. Gradients stay off, as in the cell above.

# %%
runs: Counter[str] = Counter()
for name, branch_graph in recorder.graphs[0].named_children():
    branch_graph.register_forward_hook(lambda *_, name=name: runs.update([name]))
with torch.no_grad():
    for number in (0, 2, 2, 5):
        compiled(torch.tensor(number), x)
print(dict(runs))
assert sorted(runs.values()) == [1, 1, 2]

# %% [markdown]
# One run for each call. The branches that were not chosen cost nothing when the graph runs.
#
# With gradients there is a trap. A backend that makes no backward graph, such as the recorder or
# `"eager"`, prepares the backward pass anew at each call, by tracing every branch. So does a call
# of `switch` without `torch.compile`. The backend `aot_eager` makes the backward graph once, as the
# default backend does. Compare the three, best of five.


# %%
def seconds_per_call(function: Callable) -> float:
    function(torch.tensor(2), x)  # compile, or fill caches
    return min(timeit.repeat(lambda: function(torch.tensor(2), x), number=2, repeat=5)) / 2


once = seconds_per_call(torch.compile(by_switch, backend="aot_eager", fullgraph=True))
eager = seconds_per_call(torch.compile(by_switch, backend="eager", fullgraph=True))
plain = seconds_per_call(by_switch)
print(f"forward pass with gradients, compared to aot_eager: eager {eager / once:.0f} times as long")
print(f"without torch.compile {plain / once:.0f} times as long")
assert eager > 5 * once and plain > 5 * once

# %% [markdown]
# So train under `torch.compile`, with a backend that makes a backward graph. `"eager"` is for
# counting and for inference.

# %% [markdown]
# ## Look inside: draw the graphs
#
# First a family of branches without parameters, so that nothing else fills the picture.


# %%
def wave(frequency: float) -> Branch:
    """A branch: a sine of its own frequency on top of the input."""
    return lambda x: torch.sin(x * frequency) + x


class Chooser(nn.Module):
    """Choose one of `count` waves, in the manner of `choose`."""

    def __init__(self, choose: Callable, count: int) -> None:
        super().__init__()
        self.choose = choose
        self.waves = [wave(float(number + 1)) for number in range(count)]

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.choose(index, self.waves, (x,))


def export(choose: Callable, count: int) -> torch.export.ExportedProgram:
    return torch.export.export(Chooser(choose, count), (torch.tensor(1), x))


# %% [markdown]
# `torch.export` gives a graph of elementary operations. The graph of a branch is a child of the
# graph that uses it. So a short recursive function draws the family: one box for each graph, with
# its operations in order, and a line to each child.


# %%
def subgraphs(graph: nn.Module) -> list[torch.fx.GraphModule]:
    return [child for child in graph.children() if isinstance(child, torch.fx.GraphModule)]


def draw_graph(
    ax: plt.Axes, graph: torch.fx.GraphModule, left: float = 0.0, level: int = 0
) -> tuple[float, float]:
    """Draw `graph` with all its subgraphs below it; return its centre and its width."""
    centres, width = [], 0.0
    for child in subgraphs(graph):
        centre, child_width = draw_graph(ax, child, left + width, level + 1)
        centres.append(centre)
        width += child_width
    width = max(width, 1.0)
    middle = left + width / 2
    for centre in centres:
        ax.plot([middle, centre], [-level, -level - 1], color=GREY, zorder=1)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    text = "\n".join(node.name.rstrip("_0123456789") for node in calls)
    face = PALE_ORANGE if centres else PALE_BLUE
    box = {"boxstyle": "round", "facecolor": face, "edgecolor": INK}
    ax.text(middle, -level, text, ha="center", va="center", fontsize=9, bbox=box)
    return middle, width


# %%
def depth(graph: nn.Module) -> int:
    """How many graphs deep the nesting goes below `graph`."""
    return max((1 + depth(child) for child in subgraphs(graph)), default=0)


fig, (left_ax, right_ax) = plt.subplots(1, 2, figsize=(7.6, 4.6))
for ax, choose in ((left_ax, switch), (right_ax, cond_tower)):
    graph = export(choose, 4).graph_module
    _, width = draw_graph(ax, graph)
    ax.set(xlim=(-0.1, width + 0.1), ylim=(-3.5, 0.6), title=f"{choose.__name__}, 4 branches")
    ax.axis("off")
    print(f"{choose.__name__}: nested {depth(graph)} deep")
show(
    fig,
    alt="Two trees of graphs. switch: one box with clamp, switch and getitem, and below it four "
    "boxes with mul, sin, add. cond_tower: three boxes with cond, each below the one before.",
)
assert depth(export(switch, 4).graph_module) == 1
assert depth(export(cond_tower, 4).graph_module) == 3

# %% [markdown]
# Orange boxes branch, blue boxes compute. On the left one operation holds all four branches. On the
# right each level adds a comparison and a `cond`, and passes the operands on. A result comes out
# of a branching operation as a tuple: `getitem` takes it out. And `clamp` is a hint at something
# that you meet further down.

# %% [markdown]
# ## What the default backend makes of it
#
# `torch.compile` without `backend=` uses **Inductor**, which writes C++ or GPU code. What does it
# write for `switch`? The cell prints the lines of the generated Python that choose. The options
# only shorten the compilation: they leave out a search for vector instructions, and header caching.


# %%
def code_of_switch() -> str:
    """The code that Inductor generates for a switch between three matrix products."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
    matrices = [torch.randn(8, 8) for _ in range(3)]
    branches = [lambda x, matrix=matrix: x @ matrix for matrix in matrices]
    function = torch.compile(lambda index, x: switch(index, branches, (x,)), fullgraph=True)
    with torch.no_grad(), config.patch(quick):
        result, codes = run_and_get_code(function, torch.tensor(1), x)
    torch.testing.assert_close(result, x @ matrices[1])
    return codes[0]


if shutil.which(os.environ.get("CXX", "g++")):
    lines = [
        line for line in code_of_switch().splitlines() if "selector" in line or "else:" in line
    ]
    print("\n".join(lines))
    assert sum("selector ==" in line for line in lines) == 2
else:
    print("skipped: Inductor needs a C++ compiler here, such as g++")

# %% [markdown]
# An `if`, an `elif`, an `else`. The index becomes a Python integer with `.item()`, and one branch
# runs. On a GPU `.item()` waits for the device, at each call. Keep this in mind for later.

# %% [markdown]
# ## Measure it
#
# A tower is a weak opponent. Someone who knows `cond` builds a balanced tree, which halves the
# choice at each level. Here it is, so that the comparison is fair.


# %%
def cond_tree(
    index: torch.Tensor, branches: Sequence[Branch], operands: tuple, first: int = 0
) -> torch.Tensor:
    """Run branches[index - first] by halving the choice again and again."""
    if len(branches) == 1:
        return branches[0](*operands)
    half = len(branches) // 2

    def lower(*inner: torch.Tensor) -> torch.Tensor:
        return cond_tree(index, branches[:half], inner, first)

    def upper(*inner: torch.Tensor) -> torch.Tensor:
        return cond_tree(index, branches[half:], inner, first + half)

    return torch.cond(index < first + half, lower, upper, operands)


# %% [markdown]
# Count three things for each: the **nodes** of all graphs together, the depth, and the **visits**.
# After tracing, `torch.export` walks over the graphs to tidy them up. A visit is one call of the
# function that walks, which a *spy* from `unittest.mock` counts. That function is private.


# %%
from torch._higher_order_ops.passes import inline_invoke_subgraph as tidy


def count_nodes(graph: torch.fx.GraphModule) -> int:
    return len(graph.graph.nodes) + sum(count_nodes(child) for child in subgraphs(graph))


def measure(choose: Callable, count: int) -> dict[str, int]:
    name = "inline_single_use_recursive"
    with mock.patch.object(tidy, name, wraps=getattr(tidy, name)) as spy:
        graph = export(choose, count).graph_module
    return {"nodes": count_nodes(graph), "depth": depth(graph), "visits": spy.call_count}


sizes = (2, 4, 8, 16)
ways = (switch, cond_tree, cond_tower)
table = {way.__name__: [measure(way, size) for size in sizes] for way in ways}
for quantity in ("nodes", "depth", "visits"):
    print(f"{quantity:12}" + "".join(f"{f'N={size}':>8}" for size in sizes))
    for name, rows in table.items():
        print(f"  {name:10}" + "".join(f"{row[quantity]:8}" for row in rows))

# %% [markdown]
# Compare the last column of each block. These are counts: your machine shows the same numbers. For
# these branches you can state them as laws, and a cell can check them.

# %% tags=["claim"] claim="switch-smaller-graph"
for size, flat, tree, tower in zip(sizes, *table.values(), strict=True):
    assert flat["depth"] == 1 and tower["depth"] == size - 1
    assert flat["nodes"] == 6 * size + 6  # six for each branch: linear
    assert tower["nodes"] == 14 * size - 10  # linear too
    assert flat["nodes"] <= tree["nodes"] <= tower["nodes"]
    assert flat["visits"] == size + 1
    assert tower["visits"] == 2**size - 1  # this one is exponential

saved = 1 - table["switch"][-1]["nodes"] / table["cond_tree"][-1]["nodes"]
print(f"at N={sizes[-1]}, switch has {saved:.0%} fewer nodes than the balanced tree")

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.4))
looks = {"switch": (BLUE, "o"), "cond_tree": (ORANGE, "s"), "cond_tower": (RED, "^")}
for ax, quantity in zip(axes, ("nodes", "visits"), strict=True):
    for name, (colour, marker) in looks.items():
        values = [row[quantity] for row in table[name]]
        ax.plot(sizes, values, color=colour, marker=marker, label=name)
    ax.set(xlabel="branches", ylabel=quantity, title=f"{quantity} by number of branches")
    ax.set_xticks(sizes)
    ax.grid(True)
axes[0].legend()
axes[1].set_yscale("log")
axes[1].set_ylabel("visits (logarithmic)")
fig.tight_layout()
show(
    fig,
    alt="Two line charts over 2 to 16 branches. Nodes grow linearly for all three, switch with "
    "about half the slope. Visits, on a log scale, are lowest for switch; the tower doubles with "
    "each branch.",
)

# %% [markdown]
# Read the charts with care. The *graph* of a tower is not exponential: it is about twice the size.
# What doubles with each branch is the work of one pass of `torch.export`, since it walks over each
# nested graph again from every level above. A few branches more, and the export crawls. A balanced
# tree avoids the worst. `switch` is flat, so the question does not arise.

# %% [markdown]
# ## Route tokens to experts
#
# A **mixture of experts** has a *router*, a layer that scores the experts for each token, and each
# token goes through the expert with the best score. A *token* is one row of the input. `switch`
# takes one index for the whole call. So how do you route a batch, where each token has its own?
#
# With one more higher-order op, `map`: it applies a function to each row, and traces it once. It
# is private as well. The body of the `map` holds the `switch`.

# %%
from torch._higher_order_ops import map as map_rows


class Mixture(nn.Module):
    """Each token goes through the expert that the router likes best."""

    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def route_one(self, token: torch.Tensor) -> torch.Tensor:
        best_weight, best_expert = self.router(token).softmax(dim=-1).max(dim=-1)
        return best_weight * switch(best_expert, list(self.experts), (token,))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return map_rows(self.route_one, tokens)


# %% [markdown]
# The reference is plain Python: a loop that indexes the list. Any change of the routing must give
# the same result, and no new graph.


# %%
def reference(mixture: Mixture, tokens: torch.Tensor) -> torch.Tensor:
    rows = []
    for token in tokens:
        best_weight, best_expert = mixture.router(token).softmax(dim=-1).max(dim=-1)
        rows.append(best_weight * mixture.experts[int(best_expert)](token))
    return torch.stack(rows)


mixture, mixture_recorder = Mixture(), Recorder()
compiled_mixture = torch.compile(mixture, backend=mixture_recorder, fullgraph=True)
load: Counter[int] = Counter()
for _ in range(5):
    tokens = torch.randn(12, 8)
    load.update(mixture.router(tokens).argmax(dim=-1).tolist())
    with torch.no_grad():
        torch.testing.assert_close(compiled_mixture(tokens), reference(mixture, tokens))
print("tokens for each expert:", dict(sorted(load.items())))
print("graphs:", len(mixture_recorder.graphs))
assert len(load) == 4 and len(mixture_recorder.graphs) == 1

# %% [markdown]
# All experts had work, and one graph served five routings. A Python loop over the tokens, with a
# `switch` in it, works too. But it puts each token into the graph. Count both.


# %%
def nodes_for(function: Callable, token_count: int) -> int:
    torch.compiler.reset()  # forget earlier graphs, so that each size is compiled on its own
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(function, backend=recorder, fullgraph=True)(torch.randn(token_count, 8))
    return count_nodes(recorder.graphs[0])


def loop_over_tokens(tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([mixture.route_one(token) for token in tokens])


counts = {size: (nodes_for(mixture, size), nodes_for(loop_over_tokens, size)) for size in (4, 8)}
for size, (mapped, unrolled) in counts.items():
    print(f"{size} tokens: map {mapped} nodes, loop {unrolled} nodes")
assert counts[4][0] == counts[8][0] < counts[4][1] < counts[8][1]

# %% [markdown]
# With `map` the size of the graph does not depend on the number of tokens. When it runs, it still
# takes the tokens one after another. So this fits where few tokens arrive, such as in decoding,
# where each step has one token for each sequence. For thousands of tokens, sort them by expert and
# give each expert one matrix product. And note that `map` needs at least one row.
#
# Does it train? The next cell compares all gradients with those of the reference. An expert that
# got no token has no gradient in the reference. What it gets from `switch` is a topic of its own,
# further down.


# %%
def gradients_of(function: Callable, tokens: torch.Tensor) -> dict[str, torch.Tensor | None]:
    mixture.zero_grad()
    function(tokens).square().mean().backward()
    return {name: parameter.grad for name, parameter in mixture.named_parameters()}


torch.compiler.reset()
trained = torch.compile(mixture, backend="aot_eager", fullgraph=True)
expected = gradients_of(lambda tokens: reference(mixture, tokens), tokens)
for name, gradient in gradients_of(trained, tokens).items():
    if expected[name] is not None:
        torch.testing.assert_close(gradient, expected[name])
used_count = sum(gradient is not None for gradient in expected.values())
print(f"{used_count} of {len(expected)} gradients compared, all equal")
assert used_count >= 4 and expected["router.weight"] is not None

# %% [markdown]
# ## The index is clamped
#
# Which branch do you get for an index that has no branch? A Python list raises `IndexError`, and
# lets −1 mean the last. The documentation of `switch` promises something else: the index is
# *clamped*, which means moved to the nearest valid one.

# %% tags=["claim"] claim="switch-clamped-index"
numbered = [lambda x, number=number: x * number for number in range(3)]  # each returns its number
one = torch.ones(1)
pick = torch.compile(lambda index: switch(index, numbered, (one,)), backend="eager", fullgraph=True)
for number in (-5, -1, 0, 1, 2, 7):
    print(f"index {number:2} runs branch {pick(torch.tensor(number)).item():.0f}")
assert pick(torch.tensor(-5)) == pick(torch.tensor(-1)) == 0
assert pick(torch.tensor(7)) == 2

# %% [markdown]
# So −1 is the *first* branch, and a router with a bug that sends tokens to expert 7 of 3 trains the
# last one. Nothing warns you. The clamp is in the Python function `switch`. The operator below it,
# which you meet in graphs, has no clamp and refuses.

# %% tags=["raises"]
with expect_error(AssertionError, "out of range"):
    torch.ops.higher_order.switch(torch.tensor(7), numbered, (one,))

# %% [markdown]
# The type of the index is checked as loosely. A float is cut off, a bool becomes zero or one.

# %% tags=["claim"] claim="switch-index-type"
for index in (torch.tensor(1.5), torch.tensor(True)):
    branch = switch(index, numbered, (one,)).item()
    print(f"index {index.item()} of type {index.dtype} runs branch {branch:.0f}")
    assert branch == 1

# %% [markdown]
# ## Gradients: zero is not None
#
# Now train. Two experts, and only the first is used. What do the parameters of the second get? With
# a list they get nothing, so `.grad` stays `None`. With `switch`, see for yourself. The backend is
# `aot_eager` again: it makes a backward graph, as Inductor does, but generates no code.


# %%
def make_experts(count: int = 2) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


def with_list(experts: nn.ModuleList) -> Callable:
    return lambda index, x: experts[int(index)](x)


def with_switch(experts: nn.ModuleList) -> Callable:
    def choose(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return switch(index, list(experts), (x,))

    return torch.compile(choose, backend="aot_eager", fullgraph=True)


# %% tags=["claim"] claim="switch-zero-gradients,switch-first-gradient"
gradients = {}
for wrap in (with_list, with_switch):
    pair = make_experts()
    wrap(pair)(torch.tensor(0), x).square().mean().backward()
    used, idle = pair[0].weight.grad, pair[1].weight.grad
    gradients[wrap.__name__] = used
    idle_text = "None" if idle is None else f"zeros: {not idle.any()}"
    print(f"{wrap.__name__:12} used expert: norm {used.norm():.4f}, idle expert: {idle_text}")

torch.testing.assert_close(gradients["with_list"], gradients["with_switch"])
assert idle is not None and not idle.any()

# %% [markdown]
# The gradient of the used expert is right. The idle one has a gradient full of zeros. The reason
# is in the graph: all parameters of all experts are operands of the one `switch`, so each branch
# must return a gradient for each of them.
#
# Is a zero the same as nothing? Not for an optimizer. It skips a parameter whose `.grad` is `None`.
# For a zero, **momentum** (a running mean of old gradients) still pushes, and **weight decay**
# (a pull to zero) still pulls. Train one expert, then leave it idle, and watch its weights.


# %%
def drift(
    wrap: Callable, make_optimizer: Callable, warm_up: int = 5, idle: int = 60
) -> list[float]:
    """How far the first expert moves in each of `idle` steps after its `warm_up` steps of work."""
    pair = make_experts()
    optimizer = make_optimizer(pair.parameters())
    forward, distances = wrap(pair), []
    for step in range(warm_up + idle):
        if step == warm_up:
            start = pair[0].weight.detach().clone()
        optimizer.zero_grad()
        forward(torch.tensor(int(step >= warm_up)), x).square().mean().backward()
        optimizer.step()
        if step >= warm_up:
            distances.append((pair[0].weight - start).norm().item())
    return distances


# %%
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)  # no momentum, no weight decay


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)  # momentum, no weight decay


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=1.0)  # both; decay is strong here


drifts = {
    "list, AdamW": drift(with_list, adamw),
    "switch, SGD": drift(with_switch, sgd),
    "switch, Adam": drift(with_switch, adam),
    "switch, AdamW": drift(with_switch, adamw),
}
for name, distances in drifts.items():
    print(f"{name:14} moved {distances[-1]:.3f}")
assert drifts["list, AdamW"][-1] == drifts["switch, SGD"][-1] == 0.0
assert drifts["switch, AdamW"][-1] > drifts["switch, Adam"][-1] > 0.01
late = {name: distances[-1] - distances[-20] for name, distances in drifts.items()}
assert late["switch, AdamW"] > 2 * late["switch, Adam"]  # momentum dies down, decay does not

# %%
fig, ax = plt.subplots(figsize=(7.0, 3.4))
styles = [(GREEN, "o", "-"), (BLUE, "x", "--"), (ORANGE, "s", "-"), (RED, "^", "-")]
for (name, distances), (colour, marker, line) in zip(drifts.items(), styles, strict=True):
    ax.plot(
        range(1, len(distances) + 1),
        distances,
        line,
        color=colour,
        marker=marker,
        markevery=5,
        label=name,
    )
ax.set(xlabel="steps since the expert was last used", ylabel="distance its weights moved")
ax.set_xticks([1, 10, 20, 30, 40, 50, 60])
ax.grid(True)
ax.legend()
show(
    fig,
    alt="Four lines over sixty idle steps. List with AdamW and switch with SGD stay at zero. "
    "Switch with Adam rises and levels off, switch with AdamW keeps rising.",
)

# %% [markdown]
# The two lines at zero lie on each other. With Adam, momentum carries the expert on for a while,
# then dies down. With AdamW, weight decay shrinks it for as long as it is idle. Where an expert is
# used once in a hundred steps, that adds up. The decay here is strong, to be seen in few steps. An
# exercise below has you mend it.

# %% [markdown]
# ## Break it
#
# The messages are long. This helper shortens an error to the part that a pattern finds.


# %%
@contextlib.contextmanager
def shortened(pattern: str) -> Iterator[None]:
    """Raise the error of the block again, with only what `pattern` finds in its message."""
    try:
        yield
    except Exception as error:
        error.args = (" | ".join(re.findall(pattern, str(error))),)
        raise


# %% [markdown]
# **A branch must not return its input.** An identity branch is the most common first failure. The
# cure stands in the message: return `x.clone()`. A view of the input, here `x[:]`, shares its memory,
# and is refused for the same reason.

# %% tags=["raises"]
for shares_memory in (lambda x: x, lambda x: x[:]):
    with (
        expect_error(torch._dynamo.exc.UncapturedHigherOrderOpError, "clone()"),
        shortened("Encountered.*|Replace.*"),
    ):
        switch(torch.tensor(0), [shares_memory, torch.relu], (x,))


# %% [markdown]
# **A branch must not change its input**, says the docstring. In 2.14 that holds where gradients are
# on. Under `torch.no_grad()` it works.


# %% tags=["raises"]
def add_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1.0).sum()


def double_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2.0).sum()


with (
    expect_error(torch._dynamo.exc.UncapturedHigherOrderOpError, "input mutation"),
    shortened("Encountered.*"),
):
    switch(torch.tensor(1), [add_in_place, double_in_place], (torch.ones(2),))

# %% tags=["claim"] claim="switch-input-mutation,docs-switch-no-mutation"
buffer = torch.ones(2)
with torch.no_grad():
    total = switch(torch.tensor(1), [add_in_place, double_in_place], (buffer,))
print("buffer:", buffer.tolist(), "sum:", total.item())
assert buffer.tolist() == [2.0, 2.0] and total == 4.0

# %% [markdown]
# The release notes say that Inductor cannot compile such a branch yet. It is not tried here.

# %% [markdown]
# **Results must agree in structure and dtype.** A dtype that differs is refused, and so is a tuple
# where another branch returns one tensor. Note the word `torch.cond` in the first message: `switch`
# shares that code.

# %% tags=["raises"]
with (
    expect_error(torch._dynamo.exc.TorchRuntimeError, "expected same dtype"),
    shortened(r"When merging.*?torch\.float64"),
):
    switch(torch.tensor(0), [torch.sin, lambda x: x.double()], (x,))

with (
    expect_error(torch._dynamo.exc.TorchRuntimeError, "output spec"),
    shortened("Unmatched output spec from torch.switch branches"),
):
    switch(torch.tensor(0), [torch.sin, lambda x: (x.sin(), x.cos())], (x,))

# %% [markdown]
# **Shapes should agree too, and nobody checks.** The docstring demands the same shape. The wheel
# takes branches of different lengths, and treats the length as unknown. The error comes later, and
# only for the branch that does not fit.

# %% tags=["raises", "claim"] claim="switch-same-shape"
row = torch.randn(4)
uneven = [torch.sin, lambda row: row[:1].sin()]  # four elements, or one
uneven_sum = torch.compile(
    lambda index: switch(index, uneven, (row,)) + row, backend="eager", fullgraph=True
)
print("alone:", [len(switch(torch.tensor(number), uneven, (row,))) for number in (0, 1)])
print("plus a row, branch 0:", len(uneven_sum(torch.tensor(0))))
with expect_error(RuntimeError, "Runtime assertion failed"):
    uneven_sum(torch.tensor(1))

# %% [markdown]
# So test each branch once, with `assert result.shape == …`, before you trust a training run.

# %% [markdown]
# **Operands are tensors.** A Python number goes into the branch itself, as a default argument or
# through `functools.partial`.

# %% tags=["raises"]
with expect_error(RuntimeError, "must be a Tensor"):
    switch(torch.tensor(0), [lambda x, n: x + n, lambda x, n: x * n], (x, 3))

# %% [markdown]
# **One index for each call.** A tensor of many indices is refused. `torch.vmap`, which runs a
# function over a batch dimension, is refused too. Use `map` as above.

# %% tags=["raises"]
with expect_error(RuntimeError, "single-element"):
    switch(torch.tensor([0, 1]), numbered, (one,))

with expect_error(torch._dynamo.exc.TorchRuntimeError, "Vmap"), shortened(r"got KeyError\(.*?\)"):
    torch.vmap(lambda index, x: switch(index, numbered, (x,)))(torch.tensor([0, 1]), x[:2])

# %% [markdown]
# **First derivatives only.** The release notes say that gradients are not supported. The first
# derivatives above were right nevertheless, so read that as "not promised". The second derivative
# is worse than refused. Without `torch.compile`, `create_graph=True` gives you a gradient that looks
# fine, and is cut off from the graph.

# %%
point = torch.tensor(2.0, requires_grad=True)
cube = switch(torch.tensor(1), [torch.sin, lambda x: x**3], (point,))
(slope,) = torch.autograd.grad(cube, point, create_graph=True)
print("slope:", slope.item(), "can be differentiated again:", slope.requires_grad)
assert slope == 12.0 and not slope.requires_grad

same = torch.cond(torch.tensor(False), torch.sin, lambda x: x**3, (point,))
(slope,) = torch.autograd.grad(same, point, create_graph=True)
print("torch.cond has the same gap:", not slope.requires_grad)
assert slope == 12.0 and not slope.requires_grad

# %% [markdown]
# A gradient penalty built on that would train nothing, in silence. Assert `requires_grad` where you
# need it.

# %% [markdown]
# **A Python int chooses at compile time.** In `torch.export` you get a warning, and a program with
# one branch. The others are gone.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    program = torch.export.export(Chooser(switch, 3), (1, x))
print([str(warning.message).split(".")[0] for warning in caught])
print([node.name for node in program.graph.nodes])
assert any("Python constant" in str(warning.message) for warning in caught)
assert not subgraphs(program.graph_module)

# %% [markdown]
# The limits in one table:
#
# | you want | what happens | do this |
# |---|---|---|
# | a branch that changes nothing | refused | return `x.clone()` |
# | a branch that writes into its input | refused with gradients on | return a new tensor |
# | a number as operand | refused | bind it in the branch |
# | an index for each row | refused | `map` over the rows |
# | results of different shapes | accepted, fails later | pad, and assert the shape |
# | an error for a wrong index | clamped | the third exercise |
# | second derivatives | silently cut off | a Python list, outside of the graph |
# | all branches in an export | a Python int keeps one | pass a tensor |

# %% [markdown]
# ## Save it
#
# The usual way to ship a model is `torch.export.export`, then `torch.export.save`. With a tensor as
# index the export works, as you saw. The file does not.

# %% tags=["raises"]
with (
    expect_error(torch._export.serde.serialize.SerializeError),
    shortened("Failed serializing node switch|getattr nodes containing.*graph"),
):
    torch.export.save(export(switch, 4), io.BytesIO())

# %% [markdown]
# Pickle does not help. Its error is about exported modules as such. Its kind differs between
# versions of Python, which is why the cell names no kind.

# %% tags=["raises"]
with expect_error(Exception, "local object"):
    pickle.dumps(export(switch, 4).module())

# %% [markdown]
# What can be saved is the balanced tree from above. Its interface is the same, so one argument
# changes.

# %%
file = io.BytesIO()
torch.export.save(export(cond_tree, 4), file)
file.seek(0)
loaded = torch.export.load(file).module()
for number in range(-1, 5):
    expected = Chooser(switch, 4)(torch.tensor(number), x)
    torch.testing.assert_close(loaded(torch.tensor(number), x), expected)
print("saved as a cond tree, loaded: equal to switch for all 4 branches, and outside of them")

# %% [markdown]
# The tree sends an index outside to the first or last branch as well, by the way its comparisons
# work.
#
# The weights are not concerned: a `state_dict` is saved as ever. Where you can trace again after
# loading, keep `switch`. Where only a file may travel, use the tree. A third way is AOTInductor,
# `torch._inductor.aoti_compile_and_package`: it compiles to a package, and takes longer than this
# page may, so it is not run here.

# %% [markdown]
# ## On the real hardware
#
# All of the above ran on a CPU. A **CUDA graph** records a sequence of GPU launches once, and
# replays it without Python. The mode `reduce-overhead` uses that. For `switch` it does not: Inductor
# turns CUDA graphs off for the whole graph around it. You can read that without a GPU, in the
# function of Inductor that handles `switch`.

# %% tags=["claim"] claim="switch-no-cuda-graphs"
from torch._inductor import lowering

source_lines = inspect.getsource(lowering.switch).splitlines()
print("\n".join(line.strip() for line in source_lines if "cudagraph" in line))
assert any("disable_cudagraphs_reason = " in line for line in source_lines)

# %% [markdown]
# On a CUDA device the next cell shows that it happens. It was not run here.

# %% tags=["hardware"] hardware="cuda"
if torch.cuda.is_available():
    from torch._dynamo.utils import counters

    counters.clear()
    on_gpu = torch.compile(
        lambda index, x: switch(index, [torch.sin, torch.cos], (x,)), mode="reduce-overhead"
    )
    on_gpu(torch.tensor(1, device="cuda"), x.cuda())
    print("graphs that skip CUDA graphs:", counters["inductor"]["cudagraph_skips"])
    assert counters["inductor"]["cudagraph_skips"] >= 1
else:
    print("skipped: needs a CUDA device, to see Inductor skip CUDA graphs around a switch")

# %% [markdown] tags=["instructor"]
# **Timing.** 15 minutes to the drawing, 10 to the charts, 15 for the router and the gradients, 20 for
# limits and exercises.
#
# **Ask before the clamp cell:** what does index −1 do? Most say "the last branch" or "an error".
#
# **Ask before the drift figure:** which of the four lines move? Many expect all switch lines to move,
# or only AdamW. SGD without momentum is the control that shows what causes what.
#
# **Common wrong answers.** "switch runs all branches and masks": show the hooks. "The cond tower is
# exponential": the graph is linear, one pass of export is not. "switch routes a batch": it takes one
# index for each call; `map` gives each token its own.
#
# **In the third exercise** people try `if index < 0` first. That fails under `fullgraph=True`, which
# is the point: the decision has to become one more branch.

# %% [markdown]
# ## Your turn
#
# ### Exercise: choose an activation
#
# Write `activate(kind, x)`. `kind` is an integer tensor with one element: 0 leaves the values as
# they are, 1 applies `torch.relu`, 2 applies `torch.tanh`. It must compile to one graph.


# %% tags=["exercise"] exercise="activate" difficulty=1 minutes=5
def activate(kind: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# One of the three branches would return its input. Look at the first failure in "Break it".


# %% tags=["solution"]
def activate(kind: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return switch(kind, [lambda x: x.clone(), torch.relu, torch.tanh], (x,))


# %% tags=["check"]
activate_recorder = Recorder()
compiled_activate = torch.compile(activate, backend=activate_recorder, fullgraph=True)
for kind, expected in enumerate((x, x.relu(), x.tanh())):
    torch.testing.assert_close(compiled_activate(torch.tensor(kind), x), expected)
assert len(activate_recorder.graphs) == 1, "one graph must serve all kinds"
assert len(subgraphs(activate_recorder.graphs[0])) == 3, "the graph must hold three branches"
print("activate: correct")

# %% [markdown]
# ### Exercise: let idle experts rest
#
# Write `let_idle_rest(experts, chosen)`. It is called between `backward()` and `optimizer.step()`.
# `chosen` holds the index of the expert of each token in this batch, such as
# `router(tokens).argmax(dim=-1)`. After the call, AdamW must move the experts that were chosen,
# even one whose gradient happens to be zero, and no others.


# %% tags=["exercise"] exercise="let-idle-rest" difficulty=2 minutes=8
def let_idle_rest(experts: nn.ModuleList, chosen: torch.Tensor) -> None:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# What does an optimizer skip? And why is "the gradient is all zeros" not the right test for "idle"?


# %% tags=["solution"]
def let_idle_rest(experts: nn.ModuleList, chosen: torch.Tensor) -> None:
    busy = set(chosen.tolist())
    for number, expert in enumerate(experts):
        if number not in busy:
            expert.zero_grad(set_to_none=True)


# %% tags=["check"]
trio = make_experts(3)
trio_optimizer = adamw(trio.parameters())
for batch in (torch.tensor([0, 1, 2]), torch.tensor([2, 0, 2])):  # at first all work, then 0 and 2
    before = [expert.weight.detach().clone() for expert in trio]
    for expert in trio:  # the zeros that switch leaves: expert 2 is chosen, but gets zeros too
        for parameter in expert.parameters():
            parameter.grad = torch.zeros_like(parameter)
    trio[0].weight.grad += 1.0
    let_idle_rest(trio, batch)
    trio_optimizer.step()
moved = [not torch.equal(old, expert.weight) for old, expert in zip(before, trio, strict=True)]
assert moved == [True, False, True], f"experts 0 and 2 must move, 1 must not: {moved}"
print("let-idle-rest: correct")

# %% [markdown]
# ### Exercise: a switch that does not clamp
#
# Write `strict_switch(index, branches, operands)`. For a valid index it gives what `switch` gives.
# For any other index it gives a result of the same shape, full of NaN, so that a wrong router shows
# at once. It must compile with `fullgraph=True` to one graph: you cannot ask `if index < 0`.


# %% tags=["exercise"] exercise="strict-switch" difficulty=3 minutes=10
def strict_switch(index: torch.Tensor, branches: Sequence[Branch], operands: tuple) -> torch.Tensor:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# There is room for one branch more. And `torch.where` can move an index. Where must it send −1?


# %% tags=["solution"]
def strict_switch(index: torch.Tensor, branches: Sequence[Branch], operands: tuple) -> torch.Tensor:
    def refuse(*inner: torch.Tensor) -> torch.Tensor:
        return torch.full_like(branches[0](*inner), float("nan"))

    valid = (index >= 0) & (index < len(branches))
    return switch(torch.where(valid, index, len(branches)), [*branches, refuse], operands)


# %% tags=["check"]
strict_recorder = Recorder()
strict = torch.compile(
    lambda index, x: strict_switch(index, experts[:3], (x,)),
    backend=strict_recorder,
    fullgraph=True,
)
for number in range(3):
    torch.testing.assert_close(strict(torch.tensor(number), x), experts[number](x))
for number in (-7, -1, 3, 100):
    refused = strict(torch.tensor(number), x)
    assert refused.isnan().all() and refused.shape == x.shape, f"index {number} must give NaN"
assert len(strict_recorder.graphs) == 1, "one graph must serve all indices"
print("strict-switch: correct")

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# What does `switch` do with index −1 and four branches?
#
# - [ ] It runs the last branch, as a Python list would.
#   > A list does. `switch` clamps: look at the cell with the six indices again.
# - [x] It runs the first branch.
#   > Right: the index is moved to the nearest valid one, and that is 0.
# - [ ] It raises an error.
#   > Only the operator in `torch.ops.higher_order` does. The function clamps first.
# - [ ] It returns NaN.
#   > That is what you built in the last exercise. `switch` does not do it.

# %% [markdown] tags=["quiz"]
# Expert 3 was used in step 1, and then not for ten steps. You use `switch` and Adam without weight
# decay. What happens to its weights in these ten steps?
#
# - [ ] Nothing, because its gradient is `None`.
#   > With a Python list it would be `None`. With `switch` it is a tensor of zeros.
# - [ ] Nothing, because its gradient is zero.
#   > Zero is enough for SGD without momentum. Adam remembers step 1.
# - [x] They go on moving, less and less.
#   > Right: the running mean of the old gradient pushes on, and dies down.
# - [ ] They shrink towards zero at the same rate for ever.
#   > That is weight decay, which is off here.

# %% [markdown] tags=["quiz"]
# Why does an export with a tower of many `cond` calls take so long?
#
# - [ ] The graph has exponentially many nodes.
#   > The nodes grow linearly: the left chart is a straight line for all three.
# - [x] One pass of the export visits nested graphs again from each level above.
#   > Right: the number of visits doubles with each branch.
# - [ ] All branches are executed with real data while exporting.
#   > They are traced, not executed. And each is traced for `switch` as well.

# %% [markdown] tags=["quiz"]
# A batch has 16 tokens, each with its own expert. How do you use `switch`?
#
# - [ ] Pass the tensor of 16 indices.
#   > Refused: the index has one element.
# - [ ] Put `torch.vmap` around it.
#   > Refused as well, with an error about `Vmap`.
# - [x] Call it in the body of a `map` over the tokens.
#   > Right: the body is traced once, and runs for one token after another.
# - [ ] It cannot be done in one graph.
#   > It can: the recorder above saw one graph for all routings.

# %% [markdown] tags=["quiz"] multi=true
# Which of these go wrong **without** an error?
#
# - [x] A branch for index 7 of 3.
#   > Right: the last branch runs.
# - [ ] A branch that returns its input.
#   > This is refused, and the message names the cure.
# - [x] A gradient penalty, which needs the second derivative.
#   > Right: the first gradient comes back cut off from the graph.
# - [x] A float tensor as index.
#   > Right: it is cut off to an integer.
# - [ ] A number among the operands.
#   > This is refused: operands are tensors.
