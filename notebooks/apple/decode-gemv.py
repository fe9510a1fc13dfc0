# ---
# jupyter:
#   course:
#     title: Find out why decode crawled on a Mac, and run its Metal kernel anywhere
#     summary: Spot a decode step that reads its weight too often, mend it, check a Metal kernel.
#     minutes: 40
#     level: deeper
#     objectives:
#       - Count the bytes of weight a decode step asks for, and say when they grow with the batch.
#       - Turn a batched linear layer into one matrix product without copying the input.
#       - Predict which shapes and calls can reach the GEMV kernels of PyTorch 2.14 on an Apple GPU.
#       - Run a Metal kernel from the wheel on CPU threads, and compare it bit for bit.
#       - Explain when two orders of summation give the same bits, and when they do not.
#     prerequisites: []
#     features:
#       mps-linear-decode-path: stand-in
#     keypoints:
#       - A decode step is bound by the bytes of weight it reads. One product reads the weight once.
#       - The old MPS route took the rows of [B, 1, K] as a batch. The fix flattens them to [B, K].
#       - The GEMV kernels stand behind mm and addmm, where exactly one of M and N is 1.
#       - In gemv_nt one simdgroup owns one row, 32 lanes share it, and one simd_sum ends it.
#       - Equal bits after rounding to bfloat16 are likely, not promised. In float32 they are rare.
#     sources:
#       - title: PyTorch 2.14 release blog, F.linear Decode Path on MPS
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#       - title: "Issue #189847, the slow [B, 1, K] on MPS, with measurements"
#         url: https://github.com/pytorch/pytorch/issues/189847
#         date: 2026-07-14
#       - title: "PR #189855, the fix of the decode path"
#         url: https://github.com/pytorch/pytorch/pull/189855
#         date: 2026-07-14
#       - title: "PR #186927, the GEMV kernels"
#         url: https://github.com/pytorch/pytorch/pull/186927
#       - title: "PR #189496, flatten every input above 2-D"
#         url: https://github.com/pytorch/pytorch/pull/189496
#         date: 2026-07-09
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. Open on 21 September 2026 was PR #197862,
#       a GEMV path for fp8 scaled_mm on MPS.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torchgen
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course.kit import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    expect_error,
    plot_style,
    show,
)

torch.manual_seed(0)
plot_style()

# %% [markdown]
# A language model writes one token at a time. Each such **decode step** sends an input of shape
# `[B, 1, K]` through every linear layer: `B` sequences, one new token each, `K` features. On Apple
# GPUs this shape took a slow route. PyTorch 2.14 mends the route, and adds kernels for the case of
# a single row. Here you see both, on any machine with a CPU.
#
# > [!NOTE]
# > The release text calls this feature **API Unstable**: its behaviour may change in any later
# > release, without a deprecation. You call no new function. What changes is the route that
# > `F.linear` and `torch.mm` take inside.
#
# > [!IMPORTANT]
# > This lesson is a **stand-in**. The slow route is imitated on the CPU. The Metal kernel is
# > PyTorch's own source text, but it runs on CPU threads. Its results mean something, its speed
# > does not: **no Metal speed is measured here**. A later section holds a cell for a real Mac.
#
# Five words first. **MPS** is PyTorch's backend for Apple GPUs, **Metal** the language of their
# kernels, and a **kernel** a function that runs on many threads of a GPU. **GEMM** is a product
# of two matrices, **GEMV** the product of a matrix and a vector.

# %% [markdown]
# ## The problem: the same weight, read again and again
#
# A linear layer multiplies by a weight of shape `[N, K]`. Below are two ways to compute it for
# `B` rows. They do the same multiplications.


# %%
def as_one_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, 1, K] -> [B, 1, N] as one product of a [B, K] and a [K, N] matrix."""
    rows = x.flatten(0, -2)
    return torch.mm(rows, weight.t()).unflatten(0, x.shape[:-1])


def as_a_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same as B small products, each of one row with its own (equal) matrix."""
    matrices = weight.t().expand(x.shape[0], -1, -1)  # B times the same memory, no copy
    return torch.bmm(x, matrices)


x = torch.randn(4, 1, 64)
weight = torch.randn(32, 64)
torch.testing.assert_close(as_one_product(x, weight), as_a_batch(x, weight))
torch.testing.assert_close(as_one_product(x, weight), F.linear(x, weight))
print("both ways agree with F.linear, shape", tuple(as_a_batch(x, weight).shape))

# %% [markdown]
# What differs is how often the weight is asked for. Count it. A `TorchDispatchMode` sees every
# operation that PyTorch sends to a backend, with its tensors. Its module begins with an
# underscore: the class is well known, but private. Ours adds up the size of the matrix on the
# right of each product.


# %%
class WeightBytes(TorchDispatchMode):
    """Counts the bytes of the right-hand matrix that each matrix product asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.products: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").split(".")[0]
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            right = args[2] if name in ("addmm", "baddbmm") else args[1]
            self.total += right.numel() * right.element_size()
            self.products.append(f"{name} {tuple(right.shape)}")
        return func(*args, **(kwargs or {}))


# %% [markdown]
# Count for growing batches. On the device `meta` tensors have shapes and no data, so nothing is
# computed and the weight may be as large as in a real model. `[17408, 5120]` is the layer that the
# bug report used.

# %% tags=["claim"] claim="decode-flat-or-linear,article-decode-8-5x,pr-decode-8-5x"
BATCHES = [1, 2, 4, 8, 16]
big_weight = torch.empty(17408, 5120, dtype=torch.bfloat16, device="meta")
megabytes: dict[str, list[float]] = {"one product": [], "a batch": []}
for batch in BATCHES:
    x = torch.empty(batch, 1, 5120, dtype=torch.bfloat16, device="meta")
    for name, way in [("one product", as_one_product), ("a batch", as_a_batch)]:
        with WeightBytes() as count:
            way(x, big_weight)
        megabytes[name].append(count.total / 1e6)
    print(f"B={batch:<3}", {name: round(values[-1]) for name, values in megabytes.items()}, "MB")

weight_megabytes = big_weight.numel() * big_weight.element_size() / 1e6
assert megabytes["one product"] == [weight_megabytes] * len(BATCHES)
assert megabytes["a batch"] == [weight_megabytes * batch for batch in BATCHES]

# %% [markdown]
# One product asks for the weight once, whatever the batch. The batch of small products asks for it
# once per row. A cache may answer some of these reads, but a large weight fits no cache, and a
# decode step does little else than read weights.
#
# Does a clock see it? Measure on one thread: one call for all rows against one call per row. A
# plain loop is used for the second, to leave out how well `bmm` happens to be tuned on your CPU.


# %%
def best_ms(function: Callable[[], object], repeats: int = 7) -> float:
    """The best of several runs, in milliseconds: the least disturbed by other programs."""
    function()  # the first call may prepare something
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def time_routes(dtype: torch.dtype) -> dict[str, list[float]]:
    weight = torch.randn(2048, 4096, dtype=dtype)
    milliseconds: dict[str, list[float]] = {"all rows at once": [], "row by row": []}
    for batch in BATCHES:
        x = torch.randn(batch, 1, 4096, dtype=dtype)
        at_once = best_ms(lambda x=x: F.linear(x, weight))
        by_row = best_ms(lambda x=x: [F.linear(row, weight) for row in x])
        milliseconds["all rows at once"].append(at_once)
        milliseconds["row by row"].append(by_row)
    return milliseconds


# %%
threads = torch.get_num_threads()
torch.set_num_threads(1)
measured = {dtype: time_routes(dtype) for dtype in (torch.bfloat16, torch.float32)}
torch.set_num_threads(threads)

for dtype, routes in measured.items():
    for name, values in routes.items():
        growth = values[-1] / values[0]
        print(f"{str(dtype):15} {name:17} B=16 takes {growth:5.1f} times as long as B=1")

saving = max(
    routes["row by row"][-1] / routes["all rows at once"][-1] for routes in measured.values()
)
print(f"at B=16 one call for all rows saves up to a factor of {saving:.1f}")
assert all(routes["row by row"][-1] > 4 * routes["row by row"][0] for routes in measured.values())
assert saving > 1.5

# %% [markdown]
# Row by row, the time grows with `B`. All at once, it grows more slowly in float32. In
# bfloat16 it depends: a CPU with instructions for it stays nearly flat. Without them, PyTorch may
# work row by row itself, and the two lines meet. Look at both, the bytes and the clock.


# %% tags=["hide-input"]
def draw_bytes(axes: plt.Axes) -> None:
    looks = [("a batch", "o-", ORANGE, (-56, 2)), ("one product", "s-", BLUE, (-30, 8))]
    for name, marker, colour, offset in looks:
        gigabytes = [value / 1e3 for value in megabytes[name]]
        axes.plot(BATCHES, gigabytes, marker, color=colour)
        end = (12, (gigabytes[-2] + gigabytes[-1]) / 2)
        axes.annotate(name, end, xytext=offset, textcoords="offset points", color=colour)
    axes.set(title="weight asked for (counted)", ylabel="gigabytes")


def draw_times(axes: plt.Axes) -> None:
    routes = {"row by row": ("o", ORANGE), "all rows at once": ("s", BLUE)}
    for dtype, line in [(torch.bfloat16, "-"), (torch.float32, "--")]:
        for name, (marker, colour) in routes.items():
            values = [value / measured[dtype][name][0] for value in measured[dtype][name]]
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            axes.plot(BATCHES, values, marker + line, color=colour, label=label)
    axes.set(title="time on this CPU (measured)", ylabel="times as long as B=1")
    axes.legend(fontsize=8)


# %% tags=["hide-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
draw_bytes(left)
draw_times(right)
for axes in (left, right):
    axes.set(xlabel="rows B", xticks=BATCHES, ylim=(0, None))
    axes.grid(True)
fig.tight_layout(w_pad=2)
show(
    fig,
    alt="Two line charts over the number of rows B from 1 to 16. Left: the bytes of weight rise in "
    "a straight line for a batch of small products, and stay flat for one product. Right: the "
    "time on this CPU rises in the same way row by row, and more slowly for all rows at once.",
)

# %% [markdown]
# ### What happened on a Mac
#
# On MPS, `F.linear` passed a `[B, 1, K]` input on as a batch of `B` matrices with one row each.
# The bug report [#189847](https://github.com/pytorch/pytorch/issues/189847) (14 July 2026)
# measured it on an M4 Pro in bfloat16: up to 8.5 times slower than the same data as `[B, K]`,
# growing about linearly with `B`, and back to normal at about 16 rows. float16 was the same,
# float32 was not hit.
#
# The figure belongs to the **bug**, not to the new release as a gain over anything else. A program
# that already passed `[B, K]` sees no difference. Nor does one with a single sequence.

# %% [markdown] tags=["instructor"]
# Before the count, ask: "How often is the weight read in one decode step with 8 users?" Most say 8
# times, because there are 8 results. Some say once, "because it is the same tensor". Both can be
# right: that is the point of the two functions.
#
# Common wrong answer later: "GEMV is slower than GEMM, so avoid it." For one row nothing beats a
# good GEMV. The trouble is B of them. Allow 10 minutes up to here.

# %% [markdown]
# ## The smallest thing that works: flatten first
#
# The fix in 2.14 is short: flatten all leading dimensions, so that `_mps_linear`, the function
# behind `F.linear` on MPS, gets one matrix. `as_one_product` above does the same in Python. Use it
# as a workaround on 2.13 and older. But flattening must be free. Is it?

# %%
hidden = torch.randn(4, 10, 64)  # [B, sequence, K], as a model's layer returns it
inputs = {
    "fresh [B, 1, K]": torch.randn(4, 1, 64),
    "last token, hidden[:, -1:]": hidden[:, -1:],
    "last two tokens, hidden[:, -2:]": hidden[:, -2:],
}
copied = {}
for name, tensor in inputs.items():
    copied[name] = tensor.flatten(0, -2).data_ptr() != tensor.data_ptr()
    print(f"{name:33} strides {tensor.stride()!s:14} flatten copies: {copied[name]}")
assert list(copied.values()) == [False, False, True]

# %% [markdown]
# For one token the flatten is a view, even of a slice: a dimension of size 1 may have any stride.
# With two tokens per sequence the rows no longer lie at equal distances, and PyTorch copies. That
# happens in speculative decoding, where a model checks several guessed tokens at once. The copy is
# small: it is the input, not the weight. Only `view` never copies. It refuses, so use `flatten` or
# `reshape` for this.

# %% tags=["raises"]
with expect_error(RuntimeError, "view size is not compatible"):
    hidden[:, -2:].view(-1, 64)

# %% [markdown]
# ## Look inside: two routes, two fixes
#
# The release text puts two changes under one heading. They sit in different places. The wheel
# tells you which function an operation calls on MPS, even on Linux: the table
# `native_functions.yaml` comes along with the package `torchgen`.

# %%
table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"


def mps_function(operation: str) -> str:
    """What native_functions.yaml names for MPS, or 'made of other operations'."""
    entry = table.read_text().split(f"- func: {operation}(", 1)[1].split("\n- func:", 1)[0]
    for line in entry.splitlines():
        devices, _, function = line.strip().partition(": ")
        if "MPS" in devices.split(", "):
            return function
    return "made of other operations"


routes = {name: mps_function(name) for name in ("linear", "matmul", "mm.out", "addmm.out")}
for operation, function in routes.items():
    print(f"{operation:10} on MPS -> {function}")

# %% tags=["claim"] claim="decode-linear-own-route"
assert routes["linear"] == "_mps_linear"
assert (routes["mm.out"], routes["addmm.out"]) == ("mm_out_mps", "addmm_out_mps")
assert routes["matmul"] == "made of other operations"
with WeightBytes() as count:
    torch.matmul(torch.randn(1, 1, 64), torch.randn(32, 64).t())
print("matmul of [1, 1, 64] runs:", count.products)
assert count.products == ["mm (64, 32)"]

# %% [markdown]
# So `F.linear` has a function of its own, and `torch.matmul` ends in `mm`.
#
# | change | where | whom it serves |
# |---|---|---|
# | [#189855](https://github.com/pytorch/pytorch/pull/189855), flatten | `_mps_linear` | `F.linear` and `nn.Linear` with `[B, 1, K]`, any `B` |
# | [#186927](https://github.com/pytorch/pytorch/pull/186927), GEMV kernels | the gate in `mm` and `addmm` | products with a single row or column |
#
# The second does not follow from the first: `F.linear` in eager mode hands its flattened matrix to
# Apple's own matrix product, as its source
# [Linear.mm](https://github.com/pytorch/pytorch/blob/033fee854ac70a0776a3084453910733c0addcdc/aten/src/ATen/native/mps/operations/Linear.mm)
# shows (read there, not run). You reach the GEMV kernels by `mm`, `addmm`, or a `matmul` of one
# row.
#
# The gate is a test at the start of `mm` and `addmm`. Its rule, as the pull request states it: the
# type is a real floating type, and in `[M, K] @ [K, N]` **exactly one** of `M` and `N` is 1. Which
# kernel it takes depends on how the matrix lies in memory. The rule as a function:


# %%
def gemv_route(left: torch.Tensor, right: torch.Tensor) -> str:
    """The kernel family for left @ right on MPS in 2.14, from PR #186927 and the kernels' header.

    Leaves out the load width, the group size, and a test that the output lies without gaps.
    """
    one_row, one_column = left.shape[0] == 1, right.shape[1] == 1
    if not left.is_floating_point() or one_row == one_column:
        return "not GEMV"
    matrix = right if one_row else left
    rows_are_contiguous = matrix.stride(1) == 1
    # one output value per stored row: gemv_nt. One per stored column: gemv_t (or gemv_t2d)
    return "gemv_t" if one_row == rows_are_contiguous else "gemv_nt"


# %%
N, K = 32, 64
stored_nk = torch.randn(N, K)  # as nn.Linear stores its weight
stored_kn = torch.randn(K, N)
cases = {
    "x[1,K] @ weight[N,K].t()": (torch.randn(1, K), stored_nk.t(), "gemv_nt"),
    "x[1,K] @ weight[K,N]": (torch.randn(1, K), stored_kn, "gemv_t"),
    "weight[N,K] @ x[K,1]": (stored_nk, torch.randn(K, 1), "gemv_nt"),
    "x[2,K] @ weight[N,K].t()": (torch.randn(2, K), stored_nk.t(), "not GEMV"),
    "x[1,K] @ y[K,1]": (torch.randn(1, K), torch.randn(K, 1), "not GEMV"),
    "complex x[1,K] @ [K,N]": (torch.randn(1, K).cfloat(), stored_kn.cfloat(), "not GEMV"),
}
for name, (left, right, expected) in cases.items():
    print(f"{name:26} {gemv_route(left, right)}")
    assert gemv_route(left, right) == expected

# %% [markdown]
# This table is a model of the rule, not a run on a GPU. Two lines deserve a second look. Two rows
# leave the GEMV route: it serves one sequence at a time. And a weight as `nn.Linear` stores it,
# `[N, K]`, takes `gemv_nt`: one output value for each stored row. That kernel you run now.

# %% [markdown]
# ## The real kernel, from the wheel
#
# PyTorch's wheels carry the header files of all backends, also on Linux. Among them is the source
# of the Metal kernels. It is not part of the public API.

# %%
include_folder = Path(torch.__file__).parent / "include"
header = include_folder / "ATen/native/mps/kernels/Gemv.h"
source = header.read_text() if header.exists() else ""
if not source:
    print("skipped: this build of torch ships no ATen/native/mps/kernels/Gemv.h")
else:
    lines = source.splitlines()
    families = [line.split()[2].split("(")[0] for line in lines if line.startswith("kernel void")]
    start = next(i for i, line in enumerate(lines) if line.startswith("kernel void gemv_nt"))
    body = lines[start : lines.index("}", start) + 1]
    row = next(i for i, line in enumerate(body) if "const IDX row" in line)
    loop = next(i for i, line in enumerate(body) if "for (; k + VEC <= gK" in line)
    print(*body[row : row + 7], "  ...", *body[loop:], sep="\n")

# %% [markdown]
# Read it from the top. A GPU starts threads in fixed bundles. On Apple GPUs a bundle has 32
# threads and is called a **simdgroup**. A thread's number in it is its **lane**. Several
# simdgroups, here `NSIMD` of them, form a **threadgroup**.
#
# - Each simdgroup owns one `row` of the weight.
# - Each lane begins at its own place, `lane * VEC`, multiplies `VEC` neighbours, and jumps ahead
#   by `K_STRIDE`, which is 32 times `VEC`. What the dots leave out is the same loop, four jumps at
#   once.
# - The elements behind the last full vector belong to lane 0.
# - `simd_sum` adds the 32 partial sums. Lane 0 adds the bias (the *epilogue*) and writes.

# %% tags=["claim"] claim="decode-three-kernels"
if not source:
    print("skipped: no Gemv.h to look into")
else:
    assert families == ["gemv_t", "gemv_t2d", "gemv_nt"]
    built_for = [line for line in lines if line.startswith(("MB_GEMV_FLOAT(", "MB_GEMV_LP("))]
    print("built for:", built_for)
    assert built_for == ["MB_GEMV_FLOAT(float)", "MB_GEMV_LP(half)", "MB_GEMV_LP(bfloat)"]

# %% [markdown]
# The header builds each kernel for float32, float16 and bfloat16. Now draw how 32 lanes share a
# row of 512 elements, with `VEC` of 8, as PyTorch uses it for bfloat16 when the row's length
# allows.


# %% tags=["hide-input"]
LANE_COLOURS = {0: PALE_BLUE, 1: PALE_ORANGE, 31: PALE_GREEN}


def draw_row(axes: plt.Axes, row_length: int = 512, vec: int = 8) -> None:
    for first in range(0, row_length, vec):
        lane = first // vec % 32
        colour = LANE_COLOURS.get(lane, "none")
        axes.barh(0, vec, left=first, color=colour, edgecolor=GREY, linewidth=0.5)
        if lane in LANE_COLOURS:
            place = (first + vec / 2, 0)
            axes.annotate(f"lane {lane}", place, rotation=90, ha="center", va="center", fontsize=8)
    axes.set(title="one row of the weight", yticks=[], xlabel="element k", xlim=(0, row_length))
    axes.set_xticks(range(0, row_length + 1, 64))


# %% tags=["hide-input"]
def draw_reduction(axes: plt.Axes) -> None:
    arrow = {"arrowstyle": "->", "color": INK}
    for x, (lane, colour) in zip((0, 1, 3), LANE_COLOURS.items(), strict=True):
        box = {"boxstyle": "round", "facecolor": colour, "edgecolor": INK}
        text = f"lane {lane}: adds\nits own products"
        axes.annotate("", (1.5, 0.15), (x, 0.85), arrowprops=arrow)
        axes.annotate(text, (x, 1), ha="center", va="center", bbox=box)
    axes.annotate("…", (2, 1), ha="center", fontsize=14)
    axes.annotate("simd_sum of 32 lanes, + bias, round, write y[row]", (1.5, 0), ha="center")
    axes.set(xlim=(-0.6, 3.6), ylim=(-0.1, 1.3))
    axes.axis("off")


# %% tags=["hide-input"]
fig, (top, bottom) = plt.subplots(2, 1, figsize=(8.4, 4.2), height_ratios=[1, 1.6])
draw_row(top)
draw_reduction(bottom)
fig.tight_layout()
show(
    fig,
    alt="Top: a row of 512 elements in blocks of eight. Lane 0 owns the first block and the block "
    "at 256, lane 1 the next ones, lane 31 the blocks that end at 256 and 512. Bottom: each lane "
    "adds its own products, then simd_sum joins the 32 sums into one output value.",
)

# %% [markdown]
# Neighbouring lanes read neighbouring memory, so that the GPU can fetch it in wide pieces. Each
# element of the weight is read once, by one lane.
#
# ### A shim: Metal's threads in standard C++
#
# The header is nearly C++. What is missing: some words, two types, and threads that can wait for
# each other. Supply those, and an ordinary compiler accepts the file. Such a thin layer is called
# a **shim**. First the words and the types.

# %%
SHIM_WORDS = r"""
#include <algorithm>
#include <array>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#include <ATen/native/mps/kernels/LinearAlgebra.h>  // GemvDims and GemmEpilogue, from the wheel

#define kernel              // a kernel is a function
#define device              // a CPU has one kind of memory
#define constant const
#define threadgroup static  // memory that all threads of a threadgroup share
using std::min;
using uint = unsigned int;
struct uint3 { uint x, y, z; };
namespace c10::metal {
template <class T> using opmath_t = float;  // the type to add up in
template <class T, int N> struct alignas(sizeof(T) * N) aligned_vector { T v[N]; };
}
"""

# %% [markdown]
# bfloat16 is the upper half of a float32. Reading it shifts the bits up. Writing it rounds to the
# nearest, and in a tie to the one whose last bit is 0.

# %%
SHIM_BFLOAT = r"""
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    wide += 0x7fff + ((wide >> 16) & 1);  // a tie goes to the even neighbour
    bits = uint16_t(wide >> 16);
  }
  explicit operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};
"""

# %% [markdown]
# Now the threads. Each lane is a real thread. A `std::barrier` holds every thread that arrives
# until all have arrived. `simd_sum` needs it twice: all must have written before one reads, and
# all must have read before one writes again.
#
# In which order does `simd_sum` add? We make it a switch: one lane after the other, or in pairs,
# as in a tournament. Metal's result may follow another order still. You will see when that
# matters.

# %%
SHIM_SIMDGROUP = r"""
struct Simdgroup { std::barrier<> wall{32}; float lanes[32]; };
inline thread_local Simdgroup* my_simdgroup;
inline thread_local std::barrier<>* my_threadgroup;
inline thread_local uint my_lane;
inline bool add_in_pairs = false;

inline float simd_sum(float value) {
  my_simdgroup->lanes[my_lane] = value;
  my_simdgroup->wall.arrive_and_wait();  // all 32 values are there
  float sums[32];
  std::memcpy(sums, my_simdgroup->lanes, sizeof sums);
  if (add_in_pairs) {
    for (int half = 16; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  } else {
    for (int i = 1; i < 32; ++i) sums[0] += sums[i];
  }
  my_simdgroup->wall.arrive_and_wait();  // all have read, so the place is free again
  return sums[0];
}
"""

# %%
SHIM_THREADGROUP = r"""
// gemv_t needs the next two lines, gemv_t2d also the third. We run neither, but they must compile.
enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { my_threadgroup->arrive_and_wait(); }
float simd_shuffle_down(float value, uint distance);

template <class Body> void run_threadgroup(int simdgroups, Body body) {
  std::vector<std::unique_ptr<Simdgroup>> groups;
  for (int i = 0; i < simdgroups; ++i) groups.push_back(std::make_unique<Simdgroup>());
  std::barrier<> wall(32 * simdgroups);
  std::vector<std::thread> threads;
  for (int i = 0; i < 32 * simdgroups; ++i)
    threads.emplace_back([&, i] {
      my_simdgroup = groups[i / 32].get();
      my_threadgroup = &wall;
      my_lane = i % 32;
      body(uint(i / 32), my_lane);
    });
  for (auto& thread : threads) thread.join();
}
"""

# %% [markdown]
# Last a launcher, in the place of PyTorch's Objective-C++ code on a Mac. It starts one threadgroup
# after the other, with four simdgroups each, hence four rows. The template's arguments are the
# ones that PyTorch's own list in the header has for these types.

# %%
LAUNCHER = r"""
template <class T, int VEC>
void launch(const T* weight, const T* x, T* y, const T* bias, int rows, int length, int stride) {
  constexpr int SIMDGROUPS = 4;
  GemvDims dims{rows, length, stride, 1, 1, 1, 0};
  std::array<float, 2> alpha_beta{1, 1};  // y = alpha * (weight @ x) + beta * bias
  for (int group = 0; group * SIMDGROUPS < rows; ++group)
    run_threadgroup(SIMDGROUPS, [&](uint simdgroup, uint lane) {
      gemv_nt<T, SIMDGROUPS, VEC, GemmEpilogue::Bias, /*x is contiguous*/ true>(
          weight, x, y, dims, bias, alpha_beta, uint3{uint(group), 0, 0}, simdgroup, lane);
    });
}
extern "C" void set_add_in_pairs(int on) { add_in_pairs = on; }
extern "C" void gemv_nt_bfloat16(const bfloat* weight, const bfloat* x, bfloat* y,
                                 const bfloat* bias, int rows, int length, int stride) {
  launch<bfloat, 8>(weight, x, y, bias, rows, length, stride);
}
extern "C" void gemv_nt_float32(const float* weight, const float* x, float* y,
                                const float* bias, int rows, int length, int stride) {
  launch<float, 4>(weight, x, y, bias, rows, length, stride);
}
"""

# %% [markdown]
# Compile once. The kernels are taken from the header as they stand. Only the list of variants at
# its end is left out: it tells Metal's compiler what to build, and C++ builds what the launcher
# uses. `-ffp-contract=off` forbids the compiler to fuse a multiplication and an addition.


# %%
def compile_kernel() -> ctypes.CDLL | None:
    """The wheel's gemv_nt as a library for this CPU; None (and one line that says why) without."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not source or compiler is None:
        print("skipped: needs Gemv.h from the wheel and a C++20 compiler, g++ or clang++")
        return None
    kernels = source.split("// Explicit instantiations")[0] + "\n#endif\n"
    with tempfile.TemporaryDirectory() as folder:
        program, library = Path(folder, "gemv.cpp"), Path(folder, "gemv.so")
        shim = SHIM_WORDS + SHIM_BFLOAT + SHIM_SIMDGROUP + SHIM_THREADGROUP
        program.write_text(shim + kernels + LAUNCHER)
        flags = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
        command = [compiler, *flags, "-I", str(include_folder), str(program), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print("skipped:", Path(compiler).name, "refused:", done.stderr.strip().split("\n")[0])
            return None
        return ctypes.CDLL(str(library))


metal = compile_kernel()
if metal:
    print("compiled: gemv_nt from", header.relative_to(include_folder))


# %% [markdown]
# `ctypes` passes the addresses of the tensors' data. The wrapper checks what the kernel takes for
# granted.


# %%
def metal_gemv(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """weight [N, K] @ x [K] + bias [N], by PyTorch's Metal kernel on CPU threads."""
    assert metal is not None, "no compiled kernel"
    assert weight.dtype == x.dtype == bias.dtype and weight.dtype in (torch.bfloat16, torch.float32)
    assert weight.stride(1) == 1 and x.is_contiguous() and bias.is_contiguous()
    assert weight.stride(0) % 8 == 0, "a vector load needs aligned rows"
    rows, length = weight.shape
    assert x.shape == (length,) and bias.shape == (rows,)
    y = torch.empty(rows, dtype=weight.dtype)
    function = getattr(metal, "gemv_nt_" + str(weight.dtype).removeprefix("torch."))
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, y, bias)]
    function(*addresses, rows, length, weight.stride(0))
    return y


# %% [markdown]
# ### Bit for bit
#
# A decode step of one sequence, `[1, 1, K]`, in bfloat16 with bias: once by the Metal kernel, once
# by PyTorch's own CPU kernel. Two lengths: in the second, 1000 is no multiple of 256, so lanes at
# the end of the row have less to do.

# %%
generator = torch.Generator().manual_seed(1)


def decode_problem(rows: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A weight, a token and a bias with normally distributed values."""
    shapes = [(rows, length), (length,), (rows,)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


for rows, length in [(64, 1024), (30, 1000)]:
    weight, token, bias = decode_problem(rows, length, torch.bfloat16)
    by_cpu = F.linear(token.view(1, 1, length), weight, bias).flatten()
    if metal is None:
        print("skipped: no compiled kernel")
        continue
    by_metal = metal_gemv(weight, token, bias)
    same = (by_metal.view(torch.int16) == by_cpu.view(torch.int16)).sum().item()
    print(f"N={rows:3} K={length}: {same} of {rows} outputs have the same 16 bits")
    assert same == rows

# %% [markdown]
# Not close: the same bits, although the two kernels add the products in different orders. Why?

# %% [markdown]
# ## Break it: when the order of summation shows
#
# Addition of floating-point numbers is not associative, so another order may give another last
# bit. Two facts hide that here.
#
# 1. A bfloat16 number has 8 significant bits. The product of two has at most 16, and float32 holds
#    24. So every **product is exact**, with or without a fused multiply-add.
# 2. The **sum** runs in float32 and is rounded to bfloat16 once, at the end. The orders differ in
#    the last bits of float32, and the rounding throws those away.
#
# The second is a matter of luck: if the true sum lay right at the border between two bfloat16
# numbers, a tiny difference would tip it over. Look how near the borders are. To see the sums
# before the rounding, give the same numbers to the float32 kernel.


# %%
def distance_to_border(exact: torch.Tensor) -> torch.Tensor:
    """How far each float64 value is from the nearest border between two bfloat16 values."""
    exponent = torch.frexp(exact).exponent  # |value| lies in [2**(exponent - 1), 2**exponent)
    spacing = torch.exp2((exponent - 8).double())  # between neighbours with 8 significant bits
    steps = exact / spacing
    return (steps - steps.floor() - 0.5).abs() * spacing


def in_three_orders(weight: torch.Tensor, token: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The float32 sums: Metal kernel lane by lane, in pairs, and PyTorch's CPU kernel."""
    wide = [tensor.float() for tensor in (weight, token, bias)]
    results = [F.linear(wide[1], wide[0], wide[2])]
    for pairs in (1, 0):
        metal.set_add_in_pairs(pairs)
        results.insert(0, metal_gemv(*wide))
    return torch.stack(results)


# %%
weight, token, bias = decode_problem(64, 1024, torch.bfloat16)
exact = weight.double() @ token.double() + bias.double()
border = distance_to_border(exact)
if metal is None:
    print("skipped: no compiled kernel")
else:
    orders = in_three_orders(weight, token, bias)
    spread = (orders.max(0).values - orders.min(0).values).double()
    print(f"largest difference between the orders: {spread.max():.1e}")
    print(f"nearest border of all 64 rows:         {border.min():.1e}")
    assert spread.max() > 0, "the orders do differ"
    assert border.min() > 5 * spread.max(), "no row is near enough to a border to tip over"
    assert all(torch.equal(row, orders[0].bfloat16()) for row in orders.bfloat16())


# %% [markdown]
# So equality was no accident, and no law either: the nearest border is many times farther away
# than the orders differ. A picture of all rows, and then the other side: many rows.


# %% tags=["hide-input"]
def draw_borders() -> plt.Figure:
    by_distance = torch.argsort(border)
    fig, axes = plt.subplots()
    axes.plot(border[by_distance], "o", color=BLUE, markersize=4)
    axes.annotate("distance to the next rounding border", (20, border.max() * 2), color=BLUE)
    if metal is not None:
        visible = spread[by_distance].clamp_min(1e-7)  # a logarithmic scale has no place for 0
        axes.plot(visible, "x", color=ORANGE, markersize=5)
        axes.annotate("difference between the orders", (20, spread.max() * 3), color=ORANGE)
    axes.set(yscale="log", ylim=(5e-8, 3), xlabel="the 64 outputs, nearest border first")
    axes.set_ylabel("absolute size")
    axes.grid(True, axis="y")
    return fig


show(
    draw_borders(),
    alt="For 64 outputs, dots show the distance to the next rounding border, crosses the "
    "difference between three orders of summation in float32. On a logarithmic scale all crosses "
    "lie far below all dots.",
)

# %% [markdown]
# Now round the sums of many more rows. One side adds in float32, in the order of your CPU's
# library. The other adds in float64, where the order hardly matters.

# %%
many, differ, largest_step = 0, 0, 0
for _ in range(4):
    weight, token = decode_problem(50_000, 256, torch.bfloat16)[:2]
    in_float32 = F.linear(token.float(), weight.float()).bfloat16()
    in_float64 = F.linear(token.double(), weight.double()).bfloat16()
    steps = (in_float32.view(torch.int16).int() - in_float64.view(torch.int16).int()).abs()
    many, differ = many + len(steps), differ + (steps > 0).sum().item()
    largest_step = max(largest_step, steps.max().item())
print(f"{differ} of {many} rows round to another bfloat16 number, {largest_step} step away")
assert 0 < differ < many / 1000
assert largest_step == 1

# %% [markdown]
# Some rows tipped over, each to the neighbouring number. So where you compare two correct kernels
# in bfloat16, allow one step, and expect to need it rarely.
#
# In float32 nothing is thrown away at the end. Count the equal bits there.

# %%
if metal is None:
    print("skipped: no compiled kernel")
else:
    weight, token, bias = decode_problem(64, 1024, torch.float32)
    lane_by_lane, in_pairs, by_cpu = in_three_orders(weight, token, bias)
    for name, other in [("PyTorch's CPU kernel", by_cpu), ("the same kernel, pairs", in_pairs)]:
        same = (lane_by_lane == other).sum().item()
        print(f"lane by lane against {name}: {same} of 64 outputs have the same bits")
        assert same < 64
        torch.testing.assert_close(lane_by_lane, other, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The second line is the instructive one. The same kernel differs from itself when only `simd_sum`
# adds in another order. A Mac's hardware has an order of its own, so **float32 results of a GPU
# and this shim need not agree in the last bits**. Compare such results with a tolerance.
#
# Rounding to bfloat16 does not always save you either. Build a row whose large numbers cancel.

# %%
token = torch.ones(1024, dtype=torch.bfloat16)
weight = torch.ones(1, 1024, dtype=torch.bfloat16)
weight[0, 0], weight[0, -1] = 2.0**24, -(2.0**24)  # float32 cannot hold 2**24 + 1
bias = torch.zeros(1, dtype=torch.bfloat16)
exact = (weight.double() @ token.double()).item()
print(f"exact sum: {exact:g}   PyTorch's CPU kernel: {F.linear(token, weight).item():g}")
if metal is None:
    print("skipped: no compiled kernel")
else:
    for pairs in (0, 1):
        metal.set_add_in_pairs(pairs)
        result = metal_gemv(weight, token, bias).item()
        print("Metal kernel,", "in pairs:" if pairs else "lane by lane:", result)
        assert abs(result - exact) > 16, "wrong by more than the rounding to bfloat16"
    metal.set_add_in_pairs(0)

# %% [markdown]
# Lane 0 begins with $2^{24}$, and each 1 that it adds afterwards is lost. No kernel is wrong here:
# the row asks for more than float32 sums can give. Test data like this tells you about the order,
# not about a bug.

# %% [markdown]
# ## Measure it: bytes give the speed limit
#
# A decode step cannot take less time than its weights need to arrive from memory. The bug report
# has the time after the fix, on an M4 Pro in bfloat16 with the large weight above: 0.94 ms for one
# row, 0.93 ms for eight. How many bytes per second is that?

# %%
REPORTED_MS = {1: 0.94, 8: 0.93}  # issue #189847, M4 Pro, 14 July 2026: not measured here
bandwidth = {}
for rows, milliseconds in REPORTED_MS.items():
    seconds = milliseconds / 1e3
    bandwidth[rows] = weight_megabytes / 1e3 / seconds
    multiply_adds = rows * big_weight.numel() / seconds
    print(
        f"B={rows}: {bandwidth[rows]:.0f} GB of weight and",
        f"{multiply_adds / 1e9:.0f} billion multiply-adds per second",
    )
assert 0.95 < bandwidth[8] / bandwidth[1] < 1.05

# %% [markdown]
# Eight times the arithmetic in the same time: the arithmetic was never the limit, the reading was.
# That is why rows are nearly free in decode, as long as they share one read of the weight.

# %% [markdown]
# ## On a real Mac
#
# Executed in this lesson: counts of bytes, the CPU's own kernels, and the source text of `gemv_nt`
# on CPU threads. Not executed: `_mps_linear`, the gate in `mm`, Metal's compiler, a GPU. On a Mac
# the cell below times the three routes. On 2.14 expect the `[B, 1, K]` row to follow the `[B, K]`
# row. On an affected older release it grows with `B` up to about 16.


# %%
def time_on_mps(batch: int, weight: torch.Tensor) -> dict[str, float]:
    x = torch.randn(batch, 1, weight.shape[1], dtype=weight.dtype, device="mps")
    ways = {
        "linear [B,1,K]": lambda: F.linear(x, weight),
        "linear [B,K]": lambda: F.linear(x[:, 0], weight),
        "matmul [B,1,K]": lambda: torch.matmul(x, weight.t()),
    }

    def ten_times(way: Callable[[], torch.Tensor]) -> None:
        for _ in range(10):
            way()
        torch.mps.synchronize()  # the calls return before the GPU is done

    return {name: best_ms(lambda way=way: ten_times(way)) / 10 for name, way in ways.items()}


# %% tags=["hardware"] hardware="mps"
if not torch.backends.mps.is_available():
    print("skipped: needs an Apple GPU, torch.backends.mps.is_available() is False here")
else:
    mps_weight = torch.randn(17408, 5120, dtype=torch.bfloat16, device="mps")
    for batch in BATCHES:
        milliseconds = time_on_mps(batch, mps_weight)
        print(f"B={batch:<3}", {name: round(ms, 2) for name, ms in milliseconds.items()}, "ms")

# %% [markdown]
# ## Your turn
#
# ### Exercise: the speed limit of a model
#
# Write `tokens_per_second(shapes, dtype, gigabytes_per_second, batch)`: an upper limit for decode.
# `shapes` lists the weights, each used once per step. All sequences of the batch share one read of
# them, and each gets one token per step. A gigabyte has $10^9$ bytes; ignore everything but
# weights.


# %% tags=["exercise"] exercise="decode-speed-limit" difficulty=1 minutes=5
def tokens_per_second(
    shapes: list[tuple[int, int]], dtype: torch.dtype, gigabytes_per_second: float, batch: int
) -> float:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `dtype.itemsize` is the number of bytes of one element.


# %% tags=["solution"]
def tokens_per_second(
    shapes: list[tuple[int, int]], dtype: torch.dtype, gigabytes_per_second: float, batch: int
) -> float:
    bytes_per_step = sum(rows * columns for rows, columns in shapes) * dtype.itemsize
    steps_per_second = gigabytes_per_second * 1e9 / bytes_per_step
    return steps_per_second * batch


# %% tags=["check"]
layers = [(1000, 500), (500, 1000)]
assert tokens_per_second(layers, torch.bfloat16, 2.0, batch=1) == 1000
assert tokens_per_second(layers, torch.float32, 2.0, batch=1) == 500
assert tokens_per_second(layers, torch.bfloat16, 2.0, batch=8) == 8000
print("decode-speed-limit: correct")

# %% [markdown]
# ### Exercise: one product for any shape, with a residual
#
# Write `project(x, weight, residual)`, which returns `x @ weight.t() + residual`. `x` has any
# number of leading dimensions, also none, and `residual` has the shape of the result. Exactly one
# matrix product may run, and it must add the residual itself, so that the kernel's epilogue can do
# it.


# %% tags=["exercise"] exercise="one-product" difficulty=2 minutes=10
def project(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `addmm` adds a matrix of the result's shape. `reshape(-1, n)` also accepts a tensor of one
# dimension, `flatten(0, -2)` does not.


# %% tags=["solution"]
def project(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, weight.shape[1])
    addend = residual.reshape(-1, weight.shape[0])
    return torch.addmm(addend, rows, weight.t()).view(residual.shape)


# %% tags=["check"]
weight = torch.randn(6, 8)
for leading in [(5, 1), (2, 3, 4), (7,), ()]:
    x, residual = torch.randn(*leading, 8), torch.randn(*leading, 6)
    with WeightBytes() as count:
        result = project(x, weight, residual)
    torch.testing.assert_close(result, F.linear(x, weight) + residual)
    assert count.products == ["addmm (8, 6)"], count.products
print("one-product: correct")

# %% [markdown]
# ### Exercise: which lane adds what, and when
#
# Write `elements_of_lane(lane, length, vec)`: the list of all positions `k` of a row that this
# lane of `gemv_nt` multiplies, **in the order in which it adds them**. Read the part of the kernel
# that was left out above: `print(*body[row + 7 : loop], sep="\n")`, if your wheel has the header.
#
# The check adds float32 products in your order, lane after lane, and wants the kernel's bits.


# %% tags=["exercise"] exercise="order-of-a-lane" difficulty=3 minutes=15
def elements_of_lane(lane: int, length: int, vec: int) -> list[int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# In the loop with four jumps, the inner loop runs over `i`. Inside it four products are added, one
# from each jump. So two neighbours in memory are not neighbours in the order. Where does the
# second loop begin, and who takes what is left when `length` is no multiple of `vec`?


# %% tags=["solution"]
def elements_of_lane(lane: int, length: int, vec: int) -> list[int]:
    jump, k, order = 32 * vec, lane * vec, []
    while k + 3 * jump + vec <= length:
        order += [k + i + turn * jump for i in range(vec) for turn in range(4)]
        k += 4 * jump
    while k + vec <= length:
        order += range(k, k + vec)
        k += jump
    if lane == 0:
        order += range(length // vec * vec, length)
    return order


# %% tags=["check"]
assert elements_of_lane(0, 1024, 8)[:5] == [0, 256, 512, 768, 1]
for length in (512, 1000, 1003, 1536):
    lanes = [elements_of_lane(lane, length, 4) for lane in range(32)]
    assert sorted(k for lane in lanes for k in lane) == list(range(length)), "each element once"
    if metal is None:
        continue
    weight = torch.randn(4, 1536)[:, :length]  # a view, so that the rows stay aligned
    token, bias = torch.randn(length), torch.zeros(4)
    for row, expected in zip(weight, metal_gemv(weight, token, bias), strict=True):
        total = torch.zeros(())
        for lane in lanes:
            partial = torch.zeros(())
            for product in (row * token)[lane]:
                partial = partial + product
            total = total + partial
        assert total == expected, f"length {length}: other bits than the kernel"
print("order-of-a-lane: correct" if metal else "order-of-a-lane: correct, order not run")

# %% [markdown] tags=["instructor"]
# The third exercise catches everybody who trusts the picture. The picture shows which elements a
# lane owns, not the order. The first assert of the check tells them: 0, 256, 512, 768, then 1.
#
# Ask those who finish early: why would the authors write four loads before any multiplication?
# (More loads are under way at once, so the wait for memory is shared.) Plan 30 minutes for all
# three. On machines without a compiler the check tests only ownership and the first five
# positions.

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# Eight users decode together, one token each. How often must a linear layer read its weight?
#
# - [ ] Eight times, once per user.
#   > That is what the slow route did. The rows can share one read.
# - [x] Once, if the rows reach the kernel as one matrix.
#   > Right: flatten `[8, 1, K]` to `[8, K]` and it is one product.
# - [ ] It depends on the length of the prompts.
#   > The prompt's length matters in attention. A linear layer sees one new token per sequence.

# %% [markdown] tags=["quiz"]
# What does the figure of 8.5 times compare?
#
# - [ ] The GEMV kernels of 2.14 with Apple's matrix product.
#   > No. It was reported with the bug, before the fix, and says nothing about the GEMV kernels.
# - [x] The slow `[B, 1, K]` route with the same data as `[B, K]`, on one Mac, at the worst batch.
#   > Right. A program that passed `[B, K]` all along gains nothing.
# - [ ] A Mac with 2.14 and this CPU.
#   > This lesson measures no Mac, and no such comparison was made.

# %% [markdown] tags=["quiz"] multi=true
# Which calls can take the GEMV gate of 2.14 on MPS? Tick all.
#
# - [x] `torch.mm(x, weight.t())` with `x` of shape `[1, K]`
#   > Right: one row, many columns.
# - [ ] `torch.mm(x, weight.t())` with `x` of shape `[2, K]`
#   > Two rows are a matrix. The gate wants exactly one of M and N to be 1.
# - [x] `torch.matmul(x, weight.t())` with `x` of shape `[1, 1, K]`
#   > Right: it folds to an `mm` of one row. You saw it in the count.
# - [ ] `torch.mm(x, y)` with shapes `[1, K]` and `[K, 1]`
#   > Both M and N are 1 here, and the rule says exactly one.

# %% [markdown] tags=["quiz"]
# Two correct bfloat16 kernels gave the same bits for all rows. What follows for a million rows?
#
# - [ ] They will be equal everywhere, since products of bfloat16 are exact in float32.
#   > The products are exact. The sums are not.
# - [ ] They must add in the same order.
#   > They do not. The rounding at the end hid the difference.
# - [x] Expect a few rows to differ by one step of bfloat16.
#   > Right: with many rows, some sum lies close enough to a border to tip over.

# %% [markdown] tags=["quiz"]
# The Metal kernel ran here on CPU threads. What did that show?
#
# - [x] That its arithmetic and its division of the row are right for the shapes tried.
#   > Right: same source text, same results.
# - [ ] How fast it is on a Mac.
#   > No. 32 lanes of a GPU are not 32 threads of an operating system.
# - [ ] That `F.linear` calls it on a Mac.
#   > No. `F.linear` has a route of its own, `_mps_linear`.
