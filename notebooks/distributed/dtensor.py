# ---
# jupyter:
#   course:
#     title: Shard a tensor, predict its communication, and prove the result
#     summary: >-
#       Count what a DTensor operation sends, teach DTensor your own operator, and catch the
#       sharded convolutions that are wrong without an error.
#     minutes: 45
#     level: deeper
#     objectives:
#       - Play four ranks in one process, without a launcher.
#       - Predict the placement and the communication of an operation, then count it.
#       - Register a sharding rule for an operator of your own, and say what it must not list.
#       - Prove values and gradients of a sharded computation against the full tensor.
#       - Name the sharded convolutions that are right in 2.14.1, and replace the others.
#     prerequisites: []
#     job: {function: trial_on_real_ranks, ranks: 4}
#     features:
#       dtensor-single-dim-strategies: runs
#       dtensor-linspace-logspace: runs
#       imp-dtensor-redistribute: runs
#     keypoints:
#       - A rule is a row of placements, output first, for which the plain operator on each rank's
#         own part gives the right part of the output. DTensor trusts it and never tests it.
#       - Inputs that fit no row are redistributed first. CommDebugMode counts it, and
#         ExplicitRedistributionContext turns it into an error.
#       - A Partial input fits only operators that may run before the sum. All others force an
#         all_reduce.
#       - Split by batch is safe for a convolution. Split by width is right for patches only. Most
#         other splits are wrong in 2.14.1, with no error and no communication.
#       - No communication is no proof. Compare values and gradients with the full tensor, on data
#         that can fail.
#     sources:
#       - title: PyTorch 2.14 release blog, DTensor Single-Dim Sharding Strategies
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #192147, convolutions on the last spatial dimension"
#         url: https://github.com/pytorch/pytorch/pull/192147
#         date: 2026-08-05
#       - title: "Issue #191926, wrong gradient placement of a sharded convolution"
#         url: https://github.com/pytorch/pytorch/issues/191926
#         date: 2026-08-03
#       - title: "PR #186129 (open when read), wrong label of a channel-sharded convolution"
#         url: https://github.com/pytorch/pytorch/pull/186129
#         date: 2026-06-03
#       - title: "PR #186754, tensor operators move to single-dim rules"
#         url: https://github.com/pytorch/pytorch/pull/186754
#         date: 2026-06-09
#       - title: "PR #167677, why rules for a single mesh dimension"
#         url: https://github.com/pytorch/pytorch/pull/167677
#         date: 2025-11-12
#       - title: "PyTorch documentation, torch.distributed.tensor"
#         url: https://docs.pytorch.org/docs/stable/distributed.tensor.html
#     moved_in_215: >-
#       Not compared. Run the matrix of convolutions of this lesson again on your version: it tells
#       you what has changed.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    linspace,
)
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._ops.single_dim_strategy import (
    _ShardingPlaceholder,
    register_single_dim_strategy,
)
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import local_map
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from course.kit import (
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    PALE_RED,
    PAPER,
    expect_error,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()
torch.set_num_threads(1)  # all tensors here are tiny, and a second thread would only wait

# %% [markdown]
# You split a tensor over several processes and go on as if it were whole. That is the promise of
# **DTensor**. It decides for each operation whether the processes must talk first. PyTorch 2.14
# describes over a thousand operators by short rules, and you can add your own.
#
# In this lesson you learn to predict what is sent, and you count it. And you learn to distrust: some
# sharded convolutions of 2.14.1 give a wrong result without any error. You write a check that
# catches them.
#
# > [!NOTE]
# > The release text calls this feature **API Unstable**: names and behaviour may change in any
# > later release, without a deprecation. Names that begin with an underscore, or live in a module
# > that does, are private: `_local_tensor`, `_ops`, `_utils`, `_ShardingPlaceholder`. Pin the
# > version of torch where you depend on them.
#
# Some words first. A **rank** is one process of the job, and also its number. A **collective** is a
# call that all ranks make together to exchange data. A **mesh** says which ranks take part, and how
# they are arranged. A DTensor knows the shape of the whole, its mesh, and one **placement** per mesh
# dimension, which says what each rank holds:
#
# | placement | each rank holds | short |
# |---|---|---|
# | `Shard(d)` | its slice along dimension `d` | S(d) |
# | `Replicate()` | the whole tensor | R |
# | `Partial()` | a tensor of full shape; the *sum* over the ranks is the tensor | P(sum) |
#
# `Partial("max")`, `"min"` and `"avg"` stand for another way to combine what the ranks hold.

# %% [markdown]
# ## Four ranks in one process
#
# Four real processes are slow to start and hard to look into. `LocalTensorMode` plays them all in
# one. A tensor then carries one value per rank, a **local tensor**, and each operation runs once for
# each rank. Collectives really combine these values. So results, placements and counts are those of
# four ranks. Time is not. At the end of the lesson you compare with four real processes.
#
# The mode needs a process group to talk about. The backend `fake` is one without any connection. It
# lives in PyTorch's own testing code, and is private as well.

# %%
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
four_ranks = LocalTensorMode(4)
with four_ranks:
    four_mesh = init_device_mesh("cpu", (4,))
    halves = linspace(0, 3.5, 8, device_mesh=four_mesh, placements=[Shard(0)])
    print("shape of the whole:", tuple(halves.shape), " placements:", halves.placements)
    print(halves.to_local())

# %% [markdown]
# `linspace`, new for DTensors in 2.14 together with `logspace`, makes a tensor that is split from
# the start. Its shape is that of the whole. `to_local()` gives what a rank holds, here for all four
# at once: two numbers each.
#
# Two helpers for the rest of the lesson. `local_parts` lists what the ranks hold. `place` splits a
# tensor that every rank has in full, so each takes its part and nothing is sent.


# %%
def local_parts(tensor: DTensor) -> list[torch.Tensor]:
    """What each rank holds: all ranks that this process plays, so one in a real run."""
    local = tensor.to_local()
    return list(local._local_tensors.values()) if isinstance(local, LocalTensor) else [local]


def place(tensor: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """A DTensor of `tensor`, which every rank holds in full. Sends nothing."""
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


# %% tags=["claim"] claim="dtensor-linspace"
with four_ranks:
    parts = [part.tolist() for part in local_parts(halves)]
print("one list per rank:", parts)
assert parts == [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5], [3.0, 3.5]]

# %% [markdown]
# ## The problem: a wrong image, and no error
#
# An image is too large for one device, so you split it by width. Then a 3 × 3 convolution with
# padding 1, the most common layer there is. On one device it looks like this:

# %%
draw = torch.Generator().manual_seed(0)
image = torch.randn(4, 4, 16, 16, generator=draw)  # batch, channels, height, width
weight = torch.randn(8, 4, 3, 3, generator=draw)
right_image = F.conv2d(image, weight, padding=1)
print("on one device:", tuple(right_image.shape))

# %% [markdown]
# And the same line on four ranks:

# %% tags=["claim"] claim="dtensor-as-one-device"
with four_ranks:
    split_image = place(image, Shard(3), four_mesh)
    result = F.conv2d(split_image, place(weight, Replicate(), four_mesh), padding=1)
    held = local_parts(result)
print("the result says: shape", tuple(result.shape), "placements", result.placements)
print("each rank holds:", [tuple(part.shape) for part in held])
assert result.placements == (Replicate(),), "it claims that every rank has the whole image"
assert all(part.shape[3] == 4 for part in held), "but every rank has a quarter of it"
assert not torch.equal(held[0], held[1]), "and not even the same quarter"

# %% [markdown]
# The result claims to be whole on every rank. It is not: each rank holds a different quarter. No
# error, no warning. The next layer would believe the claim and train on it.
#
# What does each quarter hold? Put the four side by side and compare with the right image, column by
# column.

# %%
side_by_side = torch.cat(held, dim=3)
difference = (side_by_side - right_image).abs().amax(dim=(0, 1, 2))
wrong_columns = difference.gt(1e-4).nonzero().flatten().tolist()
print("wrong columns:", wrong_columns)
assert wrong_columns == [3, 4, 7, 8, 11, 12]

# %%
fig, ax = plt.subplots(figsize=(7, 2.7))
for rank in range(4):
    shade = PALE_BLUE if rank % 2 == 0 else PAPER
    ax.axvspan(4 * rank - 0.5, 4 * rank + 3.5, color=shade)
    ax.text(4 * rank + 1.5, 1.03, f"rank {rank}", ha="center", transform=ax.get_xaxis_transform())
ax.bar(range(16), difference.tolist(), color=ORANGE, edgecolor=INK, hatch="//", width=0.7)
ax.set_xticks(range(16))
ax.set_xlim(-0.5, 15.5)
ax.set_xlabel("column of the image")
ax.set_ylabel("largest error")
show(
    fig,
    alt="The largest error in each of sixteen image columns, four columns per rank. Only the two "
    "columns beside each border between ranks are wrong.",
)

# %% [markdown]
# Each rank convolved its own slice, as if it were a whole image, and put zeros where its
# neighbour's columns should be. Nobody sent the missing column. So two things went wrong: the
# border columns, and the label that says "whole".
#
# To use DTensor safely you need three things: know what an operation *must* send, know the rules
# that DTensor follows, and check the result. In this order.

# %% [markdown]
# ## Predict, then count
#
# Take `a @ b`. What can the ranks compute without talking?
#
# - Each rank has some **rows of `a`** and all of `b`: it gets the same rows of the result. So
#   S(0) @ R gives S(0). In the same way R @ S(1) gives S(1), by columns.
# - Each rank has some **columns of `a`** and the matching rows of `b`. The product is a sum over
#   exactly this dimension, so each rank gets its share of the sum: S(1) @ S(0) gives Partial.
#
# Anything else needs communication first. Predict these four before you look at the next output:
# S(0) @ R, R @ S(1), S(1) @ S(0) and S(0) @ S(0). Which placement comes out, and is anything sent?
#
# `CommDebugMode`, a public tool, counts the collectives of a block.


# %%
def communication(comm_mode: CommDebugMode) -> dict[str, int]:
    """Which collectives ran how often, by the last part of their names."""
    counts = comm_mode.get_comm_counts()
    return {str(collective).split(".")[-1]: times for collective, times in counts.items()}


square = torch.randn(8, 8, generator=draw)
with four_ranks:
    for left, right in [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))]:
        with CommDebugMode() as counter:
            product = place(square, left, four_mesh) @ place(square, right, four_mesh)
        print(f"{left} @ {right} -> {product.placements[0]}, sends {communication(counter)}")
        assert counter.get_total_counts() == 0
    with CommDebugMode() as counter:
        product = place(square, Shard(0), four_mesh) @ place(square, Shard(0), four_mesh)
    print(f"S(0) @ S(0) -> {product.placements[0]}, sends {communication(counter)}")
assert communication(counter) == {"all_gather_into_tensor": 1}

# %% [markdown]
# The fourth has no local way: each rank has rows of `a` and needs *all* of `b`. So an **all-gather**
# gives every rank the parts of all others. That turns `b` into R, and the first rule fits.
#
# Partial is a promise to sum later. It is paid when somebody needs the value. You can also change a
# placement yourself, with `redistribute`. What does each change send?


# %% tags=["claim"] claim="dtensor-shard-to-partial"
def sent_by(start: DTensor, target: Placement) -> dict[str, int]:
    """What it takes to bring `start` to another placement."""
    with CommDebugMode() as counter:
        start.redistribute(four_mesh, [target])
    return communication(counter)


with four_ranks:
    by_columns = place(square, Shard(1), four_mesh)
    unpaid = by_columns @ place(square, Shard(0), four_mesh)
    print("P -> R   :", sent_by(unpaid, Replicate()))
    print("P -> S(0):", sent_by(unpaid, Shard(0)))
    print("S(1) -> R:", sent_by(by_columns, Replicate()))
    print("S(1) -> P:", sent_by(by_columns, Partial()))
    assert sent_by(by_columns, Partial()) == {}
    padded = by_columns.redistribute(four_mesh, [Partial()])
    assert torch.equal(sum(local_parts(padded)), square), "the parts sum up to the tensor"

# %% [markdown]
# - An **all-reduce** sums over the ranks, and every rank gets the whole sum.
# - A **reduce-scatter** sums too, but each rank gets only its part of the sum.
# - S(1) → P, which the release notes of 2.14 list as new, sends nothing. Each rank puts its own
#   columns into a tensor of zeros, and the sum over the ranks is the tensor.
#
# The fourth collective of this lesson, **all-to-all**, changes one split into another.
#
# ### The whole table
#
# Four placements on the left, four on the right: sixteen products. Here is what DTensor does with
# each. `partial_shares` makes a Partial tensor out of uneven shares of mixed signs. Why not four
# equal quarters? You will see when we test rules.


# %%
def partial_shares(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A Partial DTensor: every rank holds another share, and the shares sum up to `tensor`."""
    shift = 3.0
    own_rows = place(tensor + shift, Shard(0), mesh).redistribute(mesh, [Partial()])
    return DTensor.from_local(own_rows.to_local() - shift / mesh.size(), mesh, [Partial()])


def spread(tensor: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """Like `place`, for Partial too."""
    if placement.is_partial():
        return partial_shares(tensor, mesh)
    return place(tensor, placement, mesh)


# %%
all_placements = [Replicate(), Shard(0), Shard(1), Partial()]
products: dict[tuple[str, str], tuple[str, dict[str, int]]] = {}
with four_ranks:
    for left in all_placements:
        for right in all_placements:
            a, b = spread(square, left, four_mesh), spread(square, right, four_mesh)
            with CommDebugMode() as counter:
                product = a @ b
            products[str(left), str(right)] = str(product.placements[0]), communication(counter)
            for whole in local_parts(product.redistribute(four_mesh, [Replicate()])):
                torch.testing.assert_close(whole, square @ square, atol=1e-3, rtol=1e-3)
silent = sum(not sent for _, sent in products.values())
print(f"all {len(products)} products are right, {silent} of them without communication")
assert len(products) == 16 and silent == 8


# %%
def draw_table(
    ax: plt.Axes, rows: list[str], columns: list[str], cells: list[list[tuple[str, str]]]
) -> None:
    """A table with a coloured text in each cell: (text, colour), row by row from the top."""
    for y, line in enumerate(cells):
        for x, (text, colour) in enumerate(line):
            ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=INK))
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9)
    ax.set_xlim(0, len(columns))
    ax.set_ylim(len(rows), 0)
    ax.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.spines[:].set_visible(False)


# %%
short_name = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}
short_name |= {"all_reduce": "all-reduce", "shard_dim_alltoall": "all-to-all"}


def describe(sent: dict[str, int]) -> str:
    return ", ".join(f"{n} {short_name.get(name, name)}" for name, n in sent.items()) or "nothing"


# %%
names = [str(placement) for placement in all_placements]
fig, ax = plt.subplots(figsize=(7, 2.9))
table = []
for left in names:
    line = [products[left, right] for right in names]
    table.append([(f"{out}\n{describe(n)}", PALE_ORANGE if n else PALE_GREEN) for out, n in line])
draw_table(ax, names, names, table)
ax.set_xlabel("placement of b")
ax.set_ylabel("placement of a")
show(
    fig,
    alt="Sixteen products a @ b on four ranks: the placement that comes out and what is sent. "
    "Eight send nothing, the others one collective each.",
)

# %% [markdown]
# Look at the last row. P @ R needs nothing, because a product may come before the sum:
# $(\sum_i a_i)\,b = \sum_i a_i b$. P @ P has no such way, since the sum of the products is not the
# product of the sums. One of them must be summed first, by an all-reduce.
#
# ### Refuse what you did not ask for
#
# A collective that you did not plan may cost more than the product. New rules in a new version can
# also bring a new one. `ExplicitRedistributionContext`, private still, turns each into an error:

# %% tags=["raises"]
with four_ranks:
    by_rows = place(square, Shard(0), four_mesh)
    with ExplicitRedistributionContext():
        gram = by_rows.T @ by_rows  # columns times matching rows: nothing to send
        with expect_error(RuntimeError, "Implicit redistribution occurred"):
            by_rows @ by_rows
assert gram.placements == (Partial(),)

# %% [markdown]
# Now you redistribute with `.redistribute(...)` where you want it, and the line shows the cost.

# %% [markdown]
# ## Where the rules are
#
# DTensor knows how to place the result because somebody wrote it down, for each operator. Most of
# these descriptions are now **single-dim rules**. Such a rule looks at one dimension of the mesh
# only. For a mesh of two or three dimensions, DTensor combines the rules itself.

# %% tags=["claim"] claim="text-dtensor-1239-ops"
book = DTensor._op_dispatcher.sharding_propagator  # private: where DTensor keeps its rules
single_dim = set(book.op_single_dim_strategy_funcs)
older_form = set(book.op_strategy_funcs)
print("operators with single-dim rules:", len(single_dim), " in the older form:", len(older_form))
assert not single_dim & older_form
assert len(single_dim | older_form) == 1239

# %% [markdown]
# What does a rule look like? It is a function that returns rows. Let us call the one of `mm`, the
# operator behind `@`. A rule never sees data, only the shape, stride and type of each input.


# %%
def rows_of(op: torch._ops.OpOverload, *shapes: tuple[int, ...]) -> list[list]:
    """The rows that the rule of `op` lists for float inputs of these shapes."""
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    metas = tuple(TensorMeta(x.shape, x.stride(), x.dtype) for x in inputs)
    return book.op_single_dim_strategy_funcs[op](op, metas, {})


mm_rows = rows_of(torch.ops.aten.mm.default, (8, 8), (8, 8))
for row in mm_rows:
    print(row)
assert len(mm_rows) == 7

# %% [markdown]
# Read a row as: **output first, then the inputs in order**. `_ShardingPlaceholder(d)` means "split
# along `d`". You know the first three rows: they are the three you predicted. The next two say
# that a product may come before the sum, on either side. The last two say the same of an average.
#
# The row "all inputs whole, output whole" is missing, since it is true for every operator. DTensor
# adds it. So there is always a way out: gather everything.
#
# For given inputs DTensor looks for the row that is cheapest to reach. Your prediction can do the
# same: write down the rows, find the nearest.
#
# ### The forced all-reduce
#
# Which operators may run before a sum? Compare three that work on each element alone.

# %%
for op in (torch.ops.aten.neg.default, torch.ops.aten.tanh.default, torch.ops.aten.relu.default):
    rows = [row for row in rows_of(op, (8, 8)) if isinstance(row[1], Partial)]
    print(f"{op.name():12}", "  ".join(sorted(f"{row[1]} -> {row[0]}" for row in rows)))
with four_ranks:
    shares = partial_shares(square, four_mesh)
    for op in (torch.neg, torch.tanh, torch.relu):
        with CommDebugMode() as counter:
            op(shares)
        print(f"{op.__name__} of a Partial sum sends {describe(communication(counter))}")
        assert counter.get_total_counts() == (0 if op is torch.neg else 1)

# %% [markdown]
# - `neg` may come before the sum. It even turns a pending minimum into a pending maximum.
# - `tanh` never falls, so it may come before a maximum or minimum, where the order of the values is
#   all that counts. It may not come before a sum: $\tanh(a) + \tanh(b) \neq \tanh(a + b)$.
# - So for a pending **sum**, `tanh` and `relu` need the value first. The all-reduce is forced.
#
# That is the pattern to look for in a model: a Partial that meets an operator which is not linear.
# There the bill is paid, so ask there whether a reduce-scatter to a shard would do.

# %% [markdown]
# ## Teach DTensor an operator of yours
#
# Your own operator is unknown to DTensor. Take `softcap`, which bounds values softly, as some
# language models do with their attention scores.


# %%
@torch.library.custom_op("lesson::softcap", mutates_args=())
def softcap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap)


@softcap.register_fake
def _(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.empty_like(scores)  # shape and type of the result, without computing it


# %% [markdown]
# It needs a derivative too, because the check below will compare gradients:
# $\frac{d}{dx}\, c \tanh(x/c) = 1 - \tanh^2(x/c)$. This is plain PyTorch, without a word about
# ranks.


# %%
def keep_for_backward(ctx, inputs, output) -> None:
    scores, ctx.cap = inputs
    ctx.save_for_backward(scores)


def softcap_backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (scores,) = ctx.saved_tensors
    return grad * (1 - torch.tanh(scores / ctx.cap) ** 2), None


softcap.register_autograd(softcap_backward, setup_context=keep_for_backward)

# %% [markdown]
# Now give it a split tensor:

# %% tags=["raises"]
with four_ranks, expect_error(NotImplementedError, "does not have a sharding strategy"):
    softcap(place(square, Shard(1), four_mesh), 2.0)


# %% [markdown]
# The rule is one line: split along any dimension, and the result is split the same way. That is true
# because each element is computed alone. The function gets the operator and its arguments. In place
# of each tensor stands a `TensorMeta`, which has `shape`, `stride` and `dtype`.


# %% tags=["claim"] claim="dtensor-all-replicate"
@register_single_dim_strategy(torch.ops.lesson.softcap.default)
def softcap_rule(op, args, kwargs) -> list[list]:
    return [[_ShardingPlaceholder(d), _ShardingPlaceholder(d)] for d in range(len(args[0].shape))]


with four_ranks:
    for start in all_placements:
        with CommDebugMode() as counter:
            capped = softcap(spread(square, start, four_mesh), 2.0)
        end, sent = capped.placements[0], describe(communication(counter))
        print(f"{str(start):7} -> {str(end):5} sends {sent}")
        assert counter.get_total_counts() == (1 if start.is_partial() else 0)

# %% [markdown]
# Splits pass through, by rows and by columns, with nothing sent. For Partial your rule has no row, so
# DTensor falls back to the one that it added itself: make it whole. The all-reduce is forced, as for
# `tanh`, and that is right.
#
# The same rule works on a mesh of two dimensions, without a word about it:

# %%
with four_ranks:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    tiles = distribute_tensor(square, grid, [Shard(0), Shard(1)], src_data_rank=None)
    with CommDebugMode() as counter:
        capped = softcap(tiles, 2.0)
print("placements:", capped.placements, "sends", describe(communication(counter)))
assert capped.placements == (Shard(0), Shard(1)) and counter.get_total_counts() == 0


# %% [markdown]
# ### A rule that lies
#
# The all-reduce annoys you, so you add the row "Partial in, Partial out". Now it is gone. Is it?
# One trap on the way: DTensor remembers what it once decided for a shape. A rule that you register
# anew counts only after the memory is cleared.


# %%
def teach(op: torch._ops.OpOverload, rule: Callable) -> None:
    """Register `rule` for `op`, also in place of an earlier one."""
    register_single_dim_strategy(op)(rule)
    _clear_sharding_prop_cache()


def lying_rule(op, args, kwargs) -> list[list]:
    return [*softcap_rule(op, args, kwargs), [Partial(), Partial()]]


teach(torch.ops.lesson.softcap.default, lying_rule)
with four_ranks:
    with CommDebugMode() as counter:
        capped = softcap(partial_shares(square, four_mesh), 2.0)
    error = (capped.full_tensor().reconcile() - softcap(square, 2.0)).abs().max().item()
print("sends", describe(communication(counter)), f"- and the largest error is {error:.2f}")
assert counter.get_total_counts() == 0 and error > 0.1

# %% [markdown]
# Nothing is sent, and the result is wrong. DTensor believes what a rule says. A rule is a proof that
# you owe, and you can have a program check it.

# %% [markdown]
# ## A check that you can reuse
#
# The check is plain: run the function on the full tensors, run it on the same tensors split, and
# compare. It is only as good as its three details:
#
# 1. **Make it whole, and look at every rank.** `collect` refuses ranks that disagree.
# 2. **Compare gradients too.** Backward runs other operators, with other rules.
# 3. **Use data that can fail.** Zeros pass everything. So do equal shares, in some cases.


# %%
def plain(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor. Raises AssertionError where the played ranks do not agree on it."""
    return tensor.reconcile() if isinstance(tensor, LocalTensor) else tensor


def collect(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, the same on all ranks."""
    return plain(tensor.full_tensor())


@dataclass(frozen=True)
class Verdict:
    outcome: str  # "right", "wrong" or "raises"
    detail: str  # why it is not right, else the placement of the result
    sent: dict[str, int]  # collectives of the forward pass

    def __str__(self) -> str:
        return f"{self.outcome:6} {self.detail:24} sends {self.sent or 'nothing'}"


# %% [markdown]
# Gradients need a direction: the derivative of each output element, called `upstream` below. Its
# numbers are all different, so that no two errors cancel. Where the output is Partial, each rank
# needs the whole of it, because the derivative of a sum reaches every summand.


# %%
def gradients(
    function: Callable, inputs: list[torch.Tensor], upstream_for: Callable
) -> list[torch.Tensor]:
    """The derivative by each input, given how to make the upstream gradient for an output."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return list(torch.autograd.grad(output, leaves, upstream_for(output)))


def upstream_like(output: torch.Tensor) -> torch.Tensor:
    numbers = torch.linspace(-1, 2, output.numel(), device=output.device)
    return plain(numbers).view(output.shape)


def split_upstream_like(output: DTensor) -> DTensor:
    placement = output.placements[0]
    if placement.is_partial():
        placement = Replicate()
    return place(upstream_like(output), placement, output.device_mesh)


# %% [markdown]
# And the check itself. It compares values first, then gradients, and reports what the forward pass
# sent. It works for functions with one output on a mesh of one dimension, played or real. Where
# `function` takes only DTensors, pass a `reference` that does the same with full tensors.


# %%
def check_sharding(
    function: Callable,
    full: list[torch.Tensor],
    placements: list[Placement],
    mesh: DeviceMesh,
    reference: Callable | None = None,
) -> Verdict:
    """Run `function` on `full` and on the same tensors split by `placements`, and compare."""
    sent, step, reference = {}, "values", reference or function
    try:
        inputs = [spread(*pair, mesh) for pair in zip(full, placements, strict=True)]
        with CommDebugMode() as comm_mode:
            output = function(*inputs)
        sent = communication(comm_mode)
        torch.testing.assert_close(collect(output), reference(*full), atol=1e-4, rtol=1e-4)
        step = "gradients"
        got = gradients(function, inputs, split_upstream_like)
        wanted = gradients(reference, full, upstream_like)
        torch.testing.assert_close([collect(g) for g in got], wanted, atol=1e-3, rtol=1e-4)
    except AssertionError:
        return Verdict("wrong", step, sent)
    except Exception as error:  # whatever DTensor or the operator raises is a finding
        return Verdict("raises", type(error).__name__, sent)
    return Verdict("right", str(output.placements[0]), sent)


# %% [markdown]
# First the lying rule, then the honest one:


# %%
def cap_at_two(scores: torch.Tensor) -> torch.Tensor:
    return softcap(scores, 2.0)


for rule in (lying_rule, softcap_rule):
    teach(torch.ops.lesson.softcap.default, rule)
    with four_ranks:
        verdicts = [check_sharding(cap_at_two, [square], [p], four_mesh) for p in all_placements]
    for start, verdict in zip(all_placements, verdicts, strict=True):
        print(f"{rule.__name__:13} {str(start):7} {verdict}")
    assert (verdicts[-1].outcome == "wrong") == (rule is lying_rule)
    assert all(verdict.outcome == "right" for verdict in verdicts[:-1])

# %% [markdown]
# Caught. Now spoil the data, to see why the third detail matters. "relu before the sum" is the same
# kind of lie. Do these shares of a tensor reveal it?

# %%
some_shares = {
    "zeros": [torch.zeros(8, 8)] * 4,
    "equal quarters": [square / 4] * 4,
    "uneven shares": local_parts(shares),
}
passes = {}
for name, of_ranks in some_shares.items():
    passes[name] = torch.allclose(sum(x.relu() for x in of_ranks), sum(of_ranks).relu(), atol=1e-5)
    print(f"{name:15} relu before the sum looks {'right' if passes[name] else 'wrong'}")
assert passes == {"zeros": True, "equal quarters": True, "uneven shares": False}

# %% [markdown]
# Equal quarters hide it: `relu` of a quarter, four times, is `relu` of the whole. That is why
# `partial_shares` mixes signs.

# %% [markdown]
# ## Every convolution on trial
#
# Back to the image. With the check, you can put all splits on trial: five kinds of convolution,
# split by batch, channels, height or width, and with the *weight* split by its output channels.
#
# A **patch** convolution is one whose stride equals its kernel, without padding. Its windows do not
# overlap, like tiles on a floor. Vision transformers cut an image into patches with it.


# %%
@dataclass(frozen=True)
class Convolution:
    name: str
    kernel: int
    stride: int = 1
    padding: int = 0
    width: int = 16

    def __call__(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return F.conv2d(images, kernels, stride=self.stride, padding=self.padding)

    def data(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shapes = [(4, 4, 16, self.width), (8, 4, self.kernel, self.kernel)]
        return [torch.randn(shape, generator=generator) for shape in shapes]


# %%
def all_convolutions() -> list[Convolution]:
    return [
        Convolution("3×3, padding 1", kernel=3, padding=1),
        Convolution("3×3, no padding", kernel=3),
        Convolution("1×1", kernel=1),
        Convolution("patches 4×4", kernel=4, stride=4),
        Convolution("patches 4×4, width 24", kernel=4, stride=4, width=24),
    ]


def all_splits() -> dict[str, list[Placement]]:
    """The placements of the image and of the weight."""
    return {
        "batch": [Shard(0), Replicate()],
        "channels": [Shard(1), Replicate()],
        "height": [Shard(2), Replicate()],
        "width": [Shard(3), Replicate()],
        "weight, out": [Replicate(), Shard(0)],
    }


# %% [markdown]
# Draw the data *outside* of `with four_ranks`. Inside, the four played ranks would share the random
# generator and draw one after another, so each would get other numbers.


# %%
def trial(full_data: list[list[torch.Tensor]], mesh: DeviceMesh) -> list[list[Verdict]]:
    """One line per convolution, one verdict per split."""
    return [
        [check_sharding(layer, full, placements, mesh) for placements in all_splits().values()]
        for layer, full in zip(all_convolutions(), full_data, strict=True)
    ]


data = [convolution.data() for convolution in all_convolutions()]
with four_ranks:
    verdicts = trial(data, four_mesh)
print(f"{'':24}" + "".join(f"{split:13}" for split in all_splits()))
for convolution, line in zip(all_convolutions(), verdicts, strict=True):
    print(f"{convolution.name:24}" + "".join(f"{verdict.outcome:13}" for verdict in line))

# %% tags=["claim"] claim="text-dtensor-conv,dtensor-conv-elsewhere"
outcome = {
    (convolution.name, split): verdict.outcome
    for convolution, line in zip(all_convolutions(), verdicts, strict=True)
    for split, verdict in zip(all_splits(), line, strict=True)
}
right_ones = {case for case, result in outcome.items() if result == "right"}
assert sum(split == "batch" for _, split in right_ones) == 5, "by batch all are right"
assert {case for case in right_ones if case[1] != "batch"} == {
    ("1×1", "width"),
    ("patches 4×4", "width"),
}
assert {split for (_, split), result in outcome.items() if result == "raises"} == {"channels"}
assert not any(verdict.sent for line in verdicts for verdict in line), "nobody sent anything"
print(len(right_ones), "right,", list(outcome.values()).count("wrong"), "wrong without an error")

# %%
fig, ax = plt.subplots(figsize=(7, 3.0))
looks = {"right": PALE_GREEN, "wrong": PALE_RED, "raises": PALE_ORANGE}
words = {"right": "right", "wrong": "WRONG,\nno error", "raises": "raises"}
table = [[(words[v.outcome], looks[v.outcome]) for v in line] for line in verdicts]
draw_table(ax, [c.name for c in all_convolutions()], list(all_splits()), table)
ax.set_xlabel("what is split over four ranks (by width, height, …: the image)")
show(
    fig,
    alt="A table of five convolutions and five splits. By batch all are right. By width the 1 by 1 "
    "and the fitting patches are right. Channels raise. All others are wrong without an error.",
)

# %% [markdown]
# Read it column by column:
#
# - **Batch**: always right. Images are independent.
# - **Width**: right for 1 × 1 and for patches, which the release text announces. But only if each
#   rank's slice holds whole patches: a width of 24 on four ranks is 6 columns each, and a patch takes 4.
# - **Height**: never, not even for patches. The rule is about the last dimension only.
# - **Channels** of the image raise, because the weight does not fit: an honest failure.
# - **Weight** split by output channels would be easy to get right, and is wrong.
#
# And nobody sent anything, in no cell. For the red ones this is the very problem. So
# `ExplicitRedistributionContext` stays silent too: it can only object to a redistribution.

# %% [markdown]
# ### A cheap alarm
#
# The full check needs the full tensors. In a running job you can at least ask whether the label fits
# the shape of what a rank holds. To know the right shape, split a tensor of the same size that has
# no data: device `meta` keeps only shapes. Nothing is sent. Put it behind each layer that you do
# not trust.


# %%
def label_fits(tensor: DTensor) -> bool:
    """Does each rank hold a tensor of the shape that the placements promise?"""
    hollow = torch.empty(tensor.shape, device="meta")
    promised = distribute_tensor(hollow, tensor.device_mesh, tensor.placements, src_data_rank=None)
    held = [part.shape for part in local_parts(tensor)]
    expected = [part.shape for part in local_parts(promised)]
    return held == (expected if len(expected) == len(held) else expected * len(held))


def run_split(layer: Convolution, split: list[Placement]) -> DTensor:
    inputs = layer.data()
    with four_ranks:
        return layer(*[spread(*pair, four_mesh) for pair in zip(inputs, split, strict=True)])


for convolution, line in zip(all_convolutions(), verdicts, strict=True):
    for split, verdict in zip(all_splits().values(), line, strict=True):
        if verdict.outcome != "raises":
            assert label_fits(run_split(convolution, split)) == (verdict.outcome == "right")
print("in the whole table, the alarm rings for the wrong ones and for no other")

# %% [markdown]
# It is an alarm and no proof. Split image *and* weight by input channels, so that each rank has a
# share of the sum. The handler labels it "whole". The shape fits, the values do not:

# %%
both_by_channels = [Shard(1), Shard(1)]
share_of_sum = run_split(all_convolutions()[2], both_by_channels)
with four_ranks:
    verdict = check_sharding(all_convolutions()[2], data[2], both_by_channels, four_mesh)
print("label fits:", label_fits(share_of_sum), " check:", verdict)
assert label_fits(share_of_sum) and verdict.outcome == "wrong"

# %% [markdown]
# ### Why
#
# The rules are not to blame. Look at the one of the 3 × 3 convolution. The other arguments are
# bias, stride, padding, dilation, transposed, output padding and groups.

# %%
metas = [TensorMeta(x.shape, x.stride(), x.dtype) for x in (image, weight)]
conv = torch.ops.aten.convolution.default
conv_backward = torch.ops.aten.convolution_backward.default
rule_of_conv = book.op_single_dim_strategy_funcs[conv]
for row in rule_of_conv(conv, (*metas, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}):
    print(row)
print("has a handler of its own:", conv in DTensor._op_dispatcher._custom_op_handlers)
assert conv in DTensor._op_dispatcher._custom_op_handlers

# %% [markdown]
# One row: split by batch. An image split by width fits no row, so it must be gathered first: one
# all-gather, then a right result, whole on each rank. The label "whole" follows from this plan.
#
# But a convolution does not take the common path. It has a **handler** of its own, older than the
# rules. In 2.14.1 the handler asks for the plan, keeps its label, and computes with the parts as
# they are. It never does the redistribution that the plan asks for. It even contains code that
# fetches the missing columns, which is never reached: that code looks for a split in the label, and
# the label says "whole".
#
# You can prove that: take the handler away, and the common path does the rest.


# %%
@contextlib.contextmanager
def without_handlers(*ops: torch._ops.OpOverload) -> Iterator[None]:
    """Let `ops` take DTensor's common path. Touches private state, and restores it."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    taken = {op: handlers.pop(op) for op in ops}
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        handlers.update(taken)
        _clear_sharding_prop_cache()


with four_ranks, without_handlers(conv, conv_backward):
    without = trial(data, four_mesh)
for convolution, line in zip(all_convolutions(), without, strict=True):
    print(f"{convolution.name:24}" + "".join(f"{describe(v.sent):14}" for v in line))
assert all(verdict.outcome == "right" for line in without for verdict in line)

# %% [markdown]
# All right, values and gradients. Where a row fits, still nothing is sent. Elsewhere one all-gather
# makes it right, and DTensor's promise is kept at a price that you can count. This is an experiment
# on private state, not advice for production. It shows where the fault is.
#
# The fault is known: pull request #186129 of June 2026 describes the wrong label for channels. It
# was open when last looked at (see *Sources*).

# %%
with four_ranks:
    again = check_sharding(all_convolutions()[0], data[0], all_splits()["width"], four_mesh)
assert again == verdicts[0][3], "the handlers are back, and so are the wrong results"
print("3×3 by width, handlers restored:", again)

# %% [markdown]
# ## What to do instead
#
# ### Redistribute yourself
#
# If the batch is large enough, go there and back. From one split to another takes an all-to-all:
# each rank keeps a part, and sends the rest to those who need it. Nobody ever holds the whole.


# %%
def same_size_convolution(picture: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """What we want: the 3 × 3 convolution of the beginning, on full tensors."""
    return F.conv2d(picture, kernel, padding=1)


def through_batch(picture: DTensor, kernel: DTensor) -> DTensor:
    by_batch = picture.redistribute(placements=[Shard(0)])
    return same_size_convolution(by_batch, kernel).redistribute(placements=picture.placements)


by_width = [Shard(3), Replicate()]
with four_ranks:
    verdict = check_sharding(
        through_batch, [image, weight], by_width, four_mesh, reference=same_size_convolution
    )
print(verdict)
assert verdict.outcome == "right" and verdict.sent == {"shard_dim_alltoall": 2}

# %% [markdown]
# ### Say what is true: `local_map`
#
# `local_map`, public but marked experimental, runs a function on what each rank holds, and you name
# the placements. It is a rule for one call. Split the weight by output channels: each rank computes
# its own channels of the result from the whole image.
#
# The first attempt names the placements of inputs and output:


# %%
def local_convolution(image_gradient: Placement | None) -> Callable:
    """The convolution of each rank's own output channels."""
    return local_map(
        same_size_convolution,
        in_placements=([Replicate()], [Shard(0)]),
        out_placements=[Shard(1)],
        in_grad_placements=([image_gradient], [Shard(0)]) if image_gradient else None,
        device_mesh=four_mesh,
    )


def by_output_channels(image_gradient: Placement | None) -> Verdict:
    function, split = local_convolution(image_gradient), [Replicate(), Shard(0)]
    return check_sharding(
        function, [image, weight], split, four_mesh, reference=same_size_convolution
    )


with four_ranks:
    first_attempt = by_output_channels(image_gradient=None)
print(first_attempt)
assert (first_attempt.outcome, first_attempt.detail) == ("wrong", "gradients")

# %% [markdown]
# The values are right and the gradients are not. Think of the image's gradient: it is a sum over all
# output channels, and each rank has only some. So what a rank computes is a *share of the sum*. By
# default `local_map` takes the placement of the input, "whole", for its gradient. Say Partial:

# %%
with four_ranks:
    second_attempt = by_output_channels(image_gradient=Partial())
print(second_attempt)
assert second_attempt.outcome == "right" and not second_attempt.sent

# %% [markdown]
# Remember this pair: **whole going forward, Partial coming back**. It comes up wherever a whole
# tensor meets a split one. Without a check of gradients, you would not have noticed.

# %% [markdown]
# ## Measure it
#
# A count says how often, not how much. What does one rank receive, at least? With $n$ ranks and
# $b$ bytes in each rank's input to the collective:
#
# | collective | bytes received | because |
# |---|---|---|
# | all-gather | $(n-1)\,b$ | the parts of all others |
# | reduce-scatter | $\frac{n-1}{n}\,b$ | the others' sums of its own part |
# | all-reduce | $2\,\frac{n-1}{n}\,b$ | a reduce-scatter, then an all-gather of the sums |
# | all-to-all | $\frac{n-1}{n}\,b$ | one part from each of the others |
#
# A dispatch mode sees every operation below DTensor, so it can add them up.


# %%
class BytesReceived(TorchDispatchMode):
    """Adds up what one rank receives, at least, in the collectives of a block."""

    def __init__(self, ranks: int):
        super().__init__()
        part = (ranks - 1) / ranks
        self.per_input_byte = {"all_gather_into_tensor": ranks - 1, "all_reduce": 2 * part}
        self.per_input_byte |= {"reduce_scatter_tensor": part, "shard_dim_alltoall": part}
        self.total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: it calls the collectives, which we see then
        factor = self.per_input_byte.get(op.overloadpacket.__name__, 0)
        if factor:
            self.total += int(factor * args[0].nbytes)
        return op(*args, **(kwargs or {}))


# %% [markdown]
# Three right ways to convolve an image that comes split by width and must leave split by width. The
# last number is what a hand-written exchange would need: a rank in the middle gets one column from
# each neighbour, the **halo**.


# %%
def gather_first(picture: DTensor, kernel: DTensor) -> DTensor:
    whole = picture.redistribute(placements=[Replicate()])
    return same_size_convolution(whole, kernel).redistribute(placements=picture.placements)


def through_output_channels(picture: DTensor, kernel: DTensor) -> DTensor:
    whole = picture.redistribute(placements=[Replicate()])
    own_kernels = kernel.redistribute(placements=[Shard(0)])
    own_channels = local_convolution(Partial())(whole, own_kernels)
    return own_channels.redistribute(placements=picture.placements)


# %%
received = {}
with four_ranks:
    for way in (gather_first, through_output_channels, through_batch):
        verdict = check_sharding(way, [image, weight], by_width, four_mesh, same_size_convolution)
        assert verdict.outcome == "right"
        with BytesReceived(4) as counter:
            way(*[spread(*pair, four_mesh) for pair in zip((image, weight), by_width, strict=True)])
        received[way.__name__] = counter.total
        print(f"{way.__name__:24} {describe(verdict.sent):28} {counter.total:6} bytes")
received["halo, by hand"] = 2 * image[..., :1].nbytes
print(f"{'halo, by hand':24} {'2 columns':28} {received['halo, by hand']:6} bytes")
assert received["halo, by hand"] < received["through_batch"] < received["gather_first"]
assert received["gather_first"] < received["through_output_channels"]

# %% [markdown]
# `gather_first` has the convolution done four times over, once per rank. `through_output_channels`
# shares the work, and pays for the way back. `through_batch` shares it and receives least of the
# three, but needs a batch to split. The halo wins by far, and does not grow with the width: for
# large images it is worth writing by hand.
#
# With other shapes the order may change. Measure yours: it takes no cluster.

# %% [markdown]
# ## On real ranks
#
# All results so far came from one process that plays four. Do four real processes agree? `run_ranks`
# starts them, with Gloo, a backend that moves data between CPUs. Each runs the same trial.


# %%
def trial_on_real_ranks() -> None:
    dist.init_process_group("gloo")
    real_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full_data = [layer.data() for layer in all_convolutions()]
    for findings in trial(full_data, real_mesh):
        outcomes = [finding.outcome for finding in findings]
        report("line", outcomes=outcomes, sent=[finding.sent for finding in findings])
    there_and_back = check_sharding(
        through_batch, full_data[0], all_splits()["width"], real_mesh, same_size_convolution
    )
    report("batch", outcome=there_and_back.outcome, sent=there_and_back.sent)
    dist.barrier()
    dist.destroy_process_group()


# %%
real = run_ranks(trial_on_real_ranks, 4, quiet=True)
played = [([v.outcome for v in line], [v.sent for v in line]) for line in verdicts]
for rank, reports in enumerate(real.reports):
    seen = [(r["outcomes"], r["sent"]) for r in reports if r["event"] == "line"]
    assert seen == played, f"rank {rank} differs"
print("the trial: the same verdicts and counts on all four real ranks and in the simulation")
on_rank_0 = real.events("batch")[0]
print("through_batch on real ranks:", on_rank_0["outcome"], on_rank_0["sent"])
assert on_rank_0["outcome"] == "right" and on_rank_0["sent"] == {"all_gather_into_tensor": 2}

# %% [markdown]
# They agree, so the fault is in DTensor and not in the simulation.
#
# The last line shows the one difference that you should know. For Gloo, DTensor replaces an
# all-to-all by an all-gather and a cut. `through_batch` is right there too, but two all-gathers
# receive more than the one of `gather_first`. The simulation counts what a GPU backend would do.
#
# ### On GPUs
#
# The rules and the handler are the same code on every device. The next cell repeats the trial there.
# It was not run for this page. Note the first line of the function: with TF32, GPUs round
# convolutions so coarsely that a strict comparison would fail.


# %%
def trial_on_gpus() -> None:
    torch.backends.cudnn.allow_tf32 = False
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    gpu_mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    full_data = [[tensor.cuda() for tensor in layer.data()] for layer in all_convolutions()]
    for layer, findings in zip(all_convolutions(), trial(full_data, gpu_mesh), strict=True):
        if rank == 0:
            print(f"{layer.name:24}", [finding.outcome for finding in findings])
    dist.destroy_process_group()


# %% tags=["hardware"] hardware="cuda"
if torch.cuda.device_count() < 4:
    print("skipped: NCCL needs one CUDA GPU per rank, four in all, and this machine has fewer")
else:
    run_ranks(trial_on_gpus, 4)

# %% [markdown] tags=["instructor"]
# **Timing.** The problem 5 min, predict and count 10, rules and your own operator 10, the check and
# the trial 10, exercises 20 to 25. Short of time? Skip *Measure it*.
#
# **Ask before the table of products:** what does P @ P send? Common wrong answer: nothing, "because
# P @ R sends nothing". Let the room multiply out $(a_1 + a_2)(b_1 + b_2)$ and count the terms that no
# rank has.
#
# **Ask before the trial:** which convolution is easiest to split? Most say "output channels", which
# is right in mathematics and wrong in 2.14.1. This is the moment to separate the mathematics from
# the code.
#
# **Common misreading:** "nothing sent" is taken for "efficient". In the trial it means "broken" in
# more cells than not.
#
# **Common error in exercise 2:** the rows put the inputs first. The output comes first.

# %% [markdown]
# ## Your turn
#
# ### Exercise: predict
#
# Fill in how many collectives each line runs. Write the numbers down before you run anything. `x`
# has 8 rows and 8 columns, and is split by rows, so S(0). Each line is counted alone.


# %% tags=["exercise"] exercise="predict" difficulty=1 minutes=5
predicted = {
    "x.softmax(dim=1)": ...,
    "x.softmax(dim=0)": ...,
    "x.sum(dim=0)": ...,
    "x.sum(dim=0).relu()": ...,
    "x @ x.T": ...,
    "(x * 2).T": ...,
}


# %% [markdown] tags=["hint"]
# Ask for each line: does a rank need rows that it does not have? And does it need the *value* of a
# sum, or may the sum wait?


# %% tags=["solution"]
predicted = {
    "x.softmax(dim=1)": 0,  # each row alone
    "x.softmax(dim=0)": 1,  # each column needs all rows
    "x.sum(dim=0)": 0,  # Partial: the sum may wait
    "x.sum(dim=0).relu()": 1,  # relu needs the value
    "x @ x.T": 1,  # rows times all rows
    "(x * 2).T": 0,  # a transposed split is a split
}


# %% tags=["check"]
with four_ranks:
    for line, number in predicted.items():
        x = place(square, Shard(0), four_mesh)
        with CommDebugMode() as counter:
            eval(line, {"x": x})
        assert number == counter.get_total_counts(), f"{line}: count it and look at the placement"
print("predict: correct")


# %% [markdown]
# The next exercise needs an operator. This one takes `n` points and `m` centres with `d` coordinates
# each, and returns the `n` × `m` squared distances. The fake part tells the shape of the result,
# the backward part its derivatives.


# %%
@torch.library.custom_op("lesson::squared_distances", mutates_args=())
def squared_distances(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    return (points[:, None, :] - centres[None, :, :]).square().sum(-1)


@squared_distances.register_fake
def _(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    return points.new_empty(points.shape[0], centres.shape[0])


def keep_points(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def distances_backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    points, centres = ctx.saved_tensors
    by_point = 2 * (points * grad.sum(1, keepdim=True) - grad @ centres)
    by_centre = 2 * (centres * grad.sum(0).unsqueeze(1) - grad.T @ points)
    return by_point, by_centre


squared_distances.register_autograd(distances_backward, setup_context=keep_points)


# %% [markdown]
# ### Exercise: a rule for distances
#
# The operator above is new to DTensor. Write its rule, with **every** split of one mesh dimension
# that lets each rank work alone. There are three.


# %% tags=["exercise"] exercise="distance-rule" difficulty=2 minutes=10
def distance_rule(op, args, kwargs) -> list[list]:
    return []  # rows of [output, points, centres]


# %% [markdown] tags=["hint"]
# Two splits are easy: split the points, or split the centres. For the third, look at what the
# operator sums over, and at what a rank can do with some of it.


# %% tags=["solution"]
def distance_rule(op, args, kwargs) -> list[list]:
    return [
        [_ShardingPlaceholder(0), _ShardingPlaceholder(0), Replicate()],
        [_ShardingPlaceholder(1), Replicate(), _ShardingPlaceholder(0)],
        [Partial(), _ShardingPlaceholder(1), _ShardingPlaceholder(1)],  # some coordinates each
    ]


# %% tags=["check"]
teach(torch.ops.lesson.squared_distances.default, distance_rule)
points, centres = square, torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
free = 0
with four_ranks:
    for first in all_placements:
        for second in all_placements:
            verdict = check_sharding(
                squared_distances, [points, centres], [first, second], four_mesh
            )
            assert verdict.outcome == "right", f"{first}, {second}: {verdict}"
            free += not verdict.sent
assert free == 6, f"{free} of the 16 pairs of placements send nothing, and 6 can"
print("distance-rule: correct")

# %% [markdown]
# Six and not four (your rows and "all whole")? Two more pairs reach your third row for free, because
# R → S(1) sends nothing: each rank cuts its part out of what it has.


# %% [markdown]
# ### Exercise: channels, with a bias
#
# The layer is so wide that each rank holds some *input* channels: the image is split by its
# channels, and the weight by its second dimension. A convolution sums over input channels. The bias
# is whole on every rank.
#
# Write `channel_convolution(image, weight, bias)`: a 3 × 3 convolution with padding 1 that sends
# nothing in the forward pass, with right values and right gradients. DTensor's own is silently wrong
# here. The mesh is `image.device_mesh`.


# %% tags=["exercise"] exercise="channel-convolution" difficulty=3 minutes=15
def channel_convolution(image: DTensor, weight: DTensor, bias: DTensor) -> DTensor:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# What does the convolution of some input channels hold: a slice, a whole, or a share of the result?
# And if each of four ranks adds the bias to its share, how often is it in the sum? `+` adds a whole
# tensor to a Partial one; `redistribute` from R to P is refused.


# %% tags=["solution"]
def channel_convolution(image: DTensor, weight: DTensor, bias: DTensor) -> DTensor:
    convolve_shares = local_map(
        same_size_convolution,
        in_placements=([Shard(1)], [Shard(1)]),
        out_placements=[Partial()],
        device_mesh=image.device_mesh,
    )
    return convolve_shares(image, weight) + bias.view(-1, 1, 1)


# %% tags=["check"]
def with_bias(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.conv2d(image, weight, bias, padding=1)


wide_split = [Shard(1), Shard(1), Replicate()]
wide_layer = [image, weight, torch.linspace(1, 2, 8)]
with four_ranks:
    naive = check_sharding(with_bias, wide_layer, wide_split, four_mesh)
    mine = check_sharding(
        channel_convolution, wide_layer, wide_split, four_mesh, reference=with_bias
    )
assert naive.outcome == "wrong" and not naive.sent, "DTensor's own answer"
assert mine.outcome == "right", f"your answer: {mine}"
assert not mine.sent, f"it sends {mine.sent}"
print("channel-convolution: correct")

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# A rule for `abs` lists a row with `Partial()` for output and input. What does DTensor do?
#
# - [ ] It refuses the rule when it is registered.
#   > It registers every rule, and never tests one.
# - [ ] It raises when a Partial tensor arrives.
#   > The row fits, so it is used.
# - [x] It uses the row, sends nothing, and the result is wrong.
#   > Right: $|a| + |b|$ is not $|a + b|$. A rule is a proof that you owe.
# - [ ] It uses the row, and the result is right.
#   > Only where all shares have the same sign. Data that can fail would show it.

# %% [markdown] tags=["quiz"]
# `CommDebugMode` counts no collective in a sharded 3 × 3 convolution with padding, split by height.
# What do you conclude in 2.14.1?
#
# - [ ] The split is free: a good choice.
#   > Neighbouring rows are needed at each border. Who brought them?
# - [x] Something is missing, because the border rows must have come from somewhere.
#   > Right. You predicted communication, and there is none: that is an alarm.
# - [ ] The counter does not see convolutions.
#   > It counts collectives, of any operator. There were none.

# %% [markdown] tags=["quiz"]
# `relu(a @ b)` with `a` in S(1) and `b` in S(0). Where is the communication?
#
# - [ ] In the product, which gathers `b`.
#   > Columns of `a` meet matching rows of `b`: nothing to gather.
# - [x] Before `relu`: the product is Partial, and `relu` needs the value.
#   > Right. One all-reduce, forced by the operator after the product.
# - [ ] Nowhere, both are local.
#   > `relu` of a share is not a share of `relu`.

# %% [markdown] tags=["quiz"]
# A patch convolution, kernel 8 and stride 8, on a width of 96 over four ranks, split by width. What
# do you expect?
#
# - [x] A right result, with nothing sent.
#   > Right: stride equals kernel, no padding, and each rank's 24 columns are three whole patches.
# - [ ] A wrong result without an error, like all splits by width.
#   > Patches that fit are the exception that 2.14 adds.
# - [ ] An all-gather, then a right result.
#   > That is what the common path would do for a width that does not fit. The handler does not.

# %% [markdown] tags=["quiz"] multi=true
# Which of these help a check to find a wrong rule?
#
# - [x] Shares of mixed signs for a Partial input.
#   > Equal shares hide a wrong row for `relu`.
# - [x] Comparing gradients.
#   > `local_map` without `in_grad_placements` had right values and wrong gradients.
# - [ ] Counting collectives.
#   > Useful for cost. The wrong results of this lesson sent nothing, and so did many right ones.
# - [x] Looking at every rank's copy of a tensor that claims to be whole.
#   > On rank 0 alone a false "whole" may look fine.

# %%
dist.destroy_process_group()  # the fake one of the first cell: the lesson is over
