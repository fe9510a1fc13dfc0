# ---
# jupyter:
#   course:
#     title: Fuse the step after a matrix multiply, and count the bytes it saves
#     summary: Fuse bias and activation into a GEMM kernel and predict the bytes that saves.
#     minutes: 40
#     level: deeper
#     objectives:
#       - Write a Triton GEMM whose epilogue adds a bias and applies an activation.
#       - Count the bytes that a kernel asks for, and predict them from shape and tile size.
#       - Say for a shape of your own whether fusing is worth the work.
#       - Point at the matrix instruction and at the epilogue in machine code for two GPUs.
#       - Tell which steps can be an epilogue, which cannot, and what NVGEMM takes.
#     prerequisites: []
#     features:
#       nvgemm: stand-in
#     keypoints:
#       - An epilogue works on the result while it is still in the chip. Unfused, the result goes
#         to memory and comes back.
#       - Each fused elementwise step saves one write and one read of the result, whatever the tile.
#       - Larger tiles save bytes of the inputs. Fusion saves bytes of the output. They are separate.
#       - Fusing matters most where K is small. Where K is large, the inputs dominate.
#       - A tile sees a part of each row. A step that needs the whole row is no epilogue.
#       - NVGEMM is off by default. It takes some elementwise steps, and reductions after scaled_mm only.
#     sources:
#       - title: PyTorch 2.14 release blog, NVGEMM, a CuTeDSL GEMM Backend for Inductor
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#       - title: "PR #186183, listed by the release for NVGEMM"
#         url: https://github.com/pytorch/pytorch/pull/186183
#       - title: "PR #190808, pointwise epilogues after scaled GEMM"
#         url: https://github.com/pytorch/pytorch/pull/190808
#         date: 2026-07-22
#       - title: "PR #190810, grouped reductions as epilogues"
#         url: https://github.com/pytorch/pytorch/pull/190810
#         date: 2026-07-22
#       - title: "PR #191593, grouped reductions for dense and block-scaled kernels"
#         url: https://github.com/pytorch/pytorch/pull/191593
#         date: 2026-07-30
#       - title: "PR #189807, ten profiled configurations by default"
#         url: https://github.com/pytorch/pytorch/pull/189807
#       - title: "Triton issue #11584, bfloat16 dot in the interpreter"
#         url: https://github.com/triton-lang/triton/issues/11584
#       - title: PTX instruction set, wgmma and tcgen05
#         url: https://docs.nvidia.com/cuda/parallel-thread-execution/
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. PR #191593 (30 July 2026) speaks of grouped
#       reductions after plain matrix multiplies too. 2.14.1 does not contain that step.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import contextlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional as F

from course.kit import (
    BLUE,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_ORANGE,
    expect_error,
    plot_style,
    show,
)

if importlib.util.find_spec("triton") is None:  # the CPU build of torch comes without Triton
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "triton==3.8.0"], check=True)

torch.manual_seed(0)
plot_style()

# %% [markdown]
# A linear layer with an activation is three steps: multiply two matrices, add a bias, apply the
# activation. The multiplication does nearly all the arithmetic. The other two steps do little
# arithmetic, but each reads the whole result from memory and writes it back.
#
# An [**epilogue**](../../docs/glossary.md#epilogue) is work that a matrix-multiply kernel does on its result before it stores it. The
# result is still in registers then, so the extra step moves no bytes.
#
# PyTorch 2.14 teaches **NVGEMM** to do this. NVGEMM is one of the places from which `torch.compile`
# can take a matrix-multiply kernel (**GEMM**, general matrix multiply) on an NVIDIA GPU.
#
# > [!WARNING]
# > The release marks NVGEMM *API Unstable*: names and behaviour may change without a deprecation
# > period. Wrap what you use of it in one function of your own.

# %% [markdown]
# ## What runs here, and what does not
#
# NVGEMM needs an NVIDIA GPU, and this page was made without one. So you execute the mechanism:
#
# | what you see | what it is | what it is not |
# |---|---|---|
# | Triton's interpreter | your kernel, program by program, on the CPU; every load and store is real | a measure of speed |
# | Triton's compiler | real machine code for GPUs that are not here | a run of that code |
# | PyTorch's own source | the rules by which NVGEMM fuses | NVGEMM itself |
#
# `TRITON_INTERPRET` must be set before Triton is imported. From then on `@triton.jit` gives you
# kernels that run as plain Python over NumPy arrays.

# %%
os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

print("Triton", triton.__version__)

# %% [markdown]
# ## The problem: one result, three trips
#
# Here is the layer as two kernels, as `torch.compile` ran it with a GEMM that takes no epilogue.
# The first is a matrix multiply. Each **program** of it computes one [**tile**](../../docs/glossary.md#tile) of `c`: `BM` rows by
# `BN` columns. It walks along K in steps of `BK` and collects the products in an **accumulator**,
# a float32 tile that lives in registers.
#
# `FUSED` is false for now. It is a compile-time constant, so its block is then not part of the
# kernel at all.


# %%
@triton.jit
def gemm(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (depth[None, :] < K)
        in_b = (depth[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :], mask=in_a, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc)
    if FUSED:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        acc = tl.maximum(acc + bias[None, :], 0.0)
    in_c = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(tl.float16), mask=in_c)


# %% [markdown]
# The second kernel reads that result back, adds the bias, applies the activation (a ReLU), and
# writes. It uses the same tiles.


# %%
@triton.jit
def bias_relu(c_ptr, bias_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    where = rows[:, None] * N + cols[None, :]
    c = tl.load(c_ptr + where, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    tl.store(out_ptr + where, tl.maximum(c + bias[None, :], 0.0).to(tl.float16), mask=inside)


# %% [markdown]
# To count bytes, wrap the two functions through which the interpreter loads and stores. A **mask**
# says which elements a program really asks for, so the count is exact at ragged edges as well.
# `interpreter_builder` is a private part of Triton.


# %%
class ByteCounter:
    """Within the `with` block, counts the bytes that interpreted kernels load and store."""

    def __enter__(self) -> "ByteCounter":
        self.loaded = self.stored = 0
        self.originals = (
            interpreter_builder.create_masked_load,
            interpreter_builder.create_masked_store,
        )
        load, store = self.originals

        def counted_load(pointers, mask, *rest):
            self.loaded += int(np.count_nonzero(mask.data)) * element_size(pointers)
            return load(pointers, mask, *rest)

        def counted_store(pointers, value, mask, *rest):
            self.stored += int(np.count_nonzero(mask.data)) * element_size(pointers)
            return store(pointers, value, mask, *rest)

        interpreter_builder.create_masked_load = counted_load
        interpreter_builder.create_masked_store = counted_store
        return self

    def __exit__(self, *error) -> None:
        interpreter_builder.create_masked_load = self.originals[0]
        interpreter_builder.create_masked_store = self.originals[1]


def element_size(pointers) -> int:
    """Bytes of what a tensor of pointers points to."""
    return pointers.get_element_ty().primitive_bitwidth // 8


# %% [markdown]
# Now run both kernels on a small layer, and count. `layer` also does the launch: the grid is the
# number of tiles along each side.


# %%
def layer(a, b, bias, tile=(64, 64, 32), fused=False):
    """relu(a @ b + bias) in float16 by one or two kernels, and the bytes that they asked for."""
    (m, k), n = a.shape, b.shape[1]
    bm, bn, bk = tile
    grid = (triton.cdiv(m, bm), triton.cdiv(n, bn))
    product = torch.empty(m, n, dtype=torch.float16)
    result = torch.empty_like(product)
    with ByteCounter() as bytes_:
        if fused:
            gemm[grid](a, b, bias, result, m, n, k, bm, bn, bk, True)
        else:
            gemm[grid](a, b, bias, product, m, n, k, bm, bn, bk, False)
            bias_relu[grid](product, bias, result, m, n, bm, bn)
    return result, bytes_


def operands(m, n, k):
    """Random a (m, k), b (k, n) in float16 and a float32 bias (n,)."""
    return torch.randn(m, k).half(), (torch.randn(k, n) / k**0.5).half(), torch.randn(n)


# %%
a, b, bias = operands(256, 256, 64)
unfused_result, unfused = layer(a, b, bias)
exact = torch.relu(a.double() @ b.double() + bias)
print("right:", torch.allclose(unfused_result.double(), exact, atol=1e-2))
print(f"unfused: {unfused.loaded:,} bytes loaded, {unfused.stored:,} stored")
size_of_result = unfused_result.numel() * unfused_result.element_size()
print(f"the result itself has {size_of_result:,} bytes")
assert torch.allclose(unfused_result.double(), exact, atol=1e-2)
assert unfused.stored == 2 * size_of_result

# %% [markdown]
# The layer stores its result twice: once as the plain product, which nobody wants, and once as what
# you asked for. Between the two it loads the product again. That makes three trips, where one
# would do.

# %% [markdown]
# ## The smallest thing that works
#
# Set `FUSED` to true. The two lines in the `if` block of `gemm` are the epilogue. They run after the
# loop over K and before the store, on the accumulator.

# %%
fused_result, fused = layer(a, b, bias, fused=True)
print(f"unfused: {unfused.loaded:,} loaded, {unfused.stored:,} stored")
print(f"fused:   {fused.loaded:,} loaded, {fused.stored:,} stored")
saved = (unfused.loaded + unfused.stored) - (fused.loaded + fused.stored)
print(f"saved:   {saved:,} bytes = {saved / (unfused.loaded + unfused.stored):.0%}")
assert torch.allclose(fused_result.double(), exact, atol=1e-2)
assert saved == 2 * size_of_result

# %% [markdown]
# The saving is one write and one read of the result, to the byte. The inputs cost what they did.
#
# There is a second gain. The unfused layer rounds to float16 twice: when it stores the product, and
# when it stores the result. The fused one rounds once.

# %%
error_unfused = (unfused_result.double() - exact).abs().mean().item()
error_fused = (fused_result.double() - exact).abs().mean().item()
print(f"mean error: unfused {error_unfused:.2e}, fused {error_fused:.2e}")
assert error_fused < error_unfused

# %% [markdown]
# > [!NOTE]
# > So fusion changes the last bits. A test that compares a compiled model with an eager one bit for
# > bit will fail, and the compiled one is the more exact.

# %% [markdown]
# ## Look inside: predict every byte
#
# Count by hand. A program of the grid loads `BM` rows of `a` and `BN` columns of `b`, all along K.
# There are $\lceil M/BM\rceil \cdot \lceil N/BN\rceil$ programs. So each element of `a` is loaded
# once for every tile along N, and each element of `b` once for every tile along M:
#
# $$\text{inputs} = s\,K\left(M\left\lceil\frac{N}{BN}\right\rceil + N\left\lceil\frac{M}{BM}\right\rceil\right)$$
#
# with $s$ bytes an element. The bias, in float32, is read once for every tile along M. The result is
# stored once. Unfused adds one store and one load of it. `BK` does not appear: it cuts the walk
# along K, and changes nothing about what is walked over.


# %%
def predicted_bytes(m, n, k, tile, fused, size=2):
    """Bytes that `layer` asks for: m, n, k and tile in elements, `size` bytes an element."""
    bm, bn, _ = tile
    inputs = size * k * (m * triton.cdiv(n, bn) + n * triton.cdiv(m, bm))
    bias_bytes = 4 * n * triton.cdiv(m, bm)
    result_trips = 1 if fused else 3
    return inputs + bias_bytes + result_trips * size * m * n


# %% [markdown]
# A formula is a claim. Test it where such formulas go wrong: at tiles that are not square, and at
# shapes that no tile divides.

# %%
tiles = [(16, 16, 16), (32, 32, 32), (64, 32, 16), (32, 128, 64), (64, 64, 32), (128, 128, 32)]
shapes = [(256, 256, 64), (200, 136, 72), (130, 70, 50)]
print("shape            tile             fused: counted  unfused: counted")
for shape in shapes:
    for tile in tiles:
        counts = []
        for is_fused in (True, False):
            result, counted = layer(*operands(*shape), tile, is_fused)
            counts.append(counted.loaded + counted.stored)
            assert counts[-1] == predicted_bytes(*shape, tile, is_fused), (shape, tile, is_fused)
        print(f"{shape!s:16} {tile!s:16} {counts[0]:>15,} {counts[1]:>17,}")
print("every count equals its prediction")

# %% [markdown]
# Every count equals its prediction. Now you may use the formula for shapes that the interpreter
# would take hours for. First, what the tile does and what fusion does, side by side:

# %%
edges = [16, 32, 64, 128, 256]
m, n, k = 256, 256, 64
counted_pairs = []
for edge in edges:
    pair = [layer(*operands(m, n, k), (edge, edge, 32), is_fused)[1] for is_fused in (False, True)]
    counted_pairs.append([(one.loaded + one.stored) / 1024 for one in pair])
fig, ax = plt.subplots()
places = np.arange(len(edges))
for shift, column, label, colour, hatch in (
    (-0.2, 0, "two kernels", PALE_ORANGE, "//"),
    (0.2, 1, "one fused kernel", PALE_BLUE, ""),
):
    heights = [pair[column] for pair in counted_pairs]
    ax.bar(places + shift, heights, 0.4, label=label, color=colour, hatch=hatch, edgecolor=INK)
    for x, height in zip(places + shift, heights, strict=True):
        ax.text(x, height + 12, f"{height:.0f}", ha="center", fontsize=8)
ax.set_xticks(places, [f"{edge}×{edge}" for edge in edges])
ax.set(xlabel="tile of the result, rows × columns", ylabel="KiB asked for (counted)")
ax.set_title(f"M = N = {m}, K = {k}, float16")
ax.legend()
show(
    fig,
    alt="Bars of counted KiB for five tile sizes, two kernels against one fused kernel. Both fall "
    "as the tile grows. The gap between the two bars is the same at every tile size.",
)

# %% [markdown]
# Both bars fall as the tile grows: larger tiles read the inputs less often. The **gap** between the
# bars stays the same. Fusion and tiling save different bytes, so you may judge them apart.
#
# Now the question for your own layer: what share of the bytes is the gap? The inputs grow with K,
# the result does not.

# %%
depths = [2**power for power in range(5, 14)]
square = 4096
fig, ax = plt.subplots()
styles = {(64, 64, 32): (ORANGE, "s", "--"), (128, 128, 64): (BLUE, "o", "-")}
shares = {}
for tile, (colour, marker, line) in styles.items():
    for depth in depths:
        both = [
            predicted_bytes(square, square, depth, tile, is_fused) for is_fused in (True, False)
        ]
        shares[tile, depth] = 1 - both[0] / both[1]
    heights = [100 * shares[tile, depth] for depth in depths]
    label = f"tile {tile[0]}×{tile[1]}"
    ax.plot(depths, heights, color=colour, marker=marker, linestyle=line, label=label)
ax.set_xscale("log", base=2)
ax.set_xticks(depths, depths)
ax.set(xlabel=f"K, for M = N = {square}", ylabel="bytes saved by fusing, %", ylim=(0, 75))
ax.legend()
show(
    fig,
    alt="Share of bytes saved by fusing against K on a log axis, for two tile sizes. It starts near "
    "two thirds at K = 32 and falls towards zero at K = 8192, later for the larger tile.",
)
for depth in (64, 512, 4096):
    print(f"K = {depth}: {shares[(128, 128, 64), depth]:.0%} of the bytes saved, tile 128×128")
assert shares[(128, 128, 64), 64] > 0.4 > 0.1 > shares[(128, 128, 64), 4096]

# %% [markdown]
# Where K is small, fusing saves a large share: the projections of a LoRA adapter, the heads of
# attention, a convolution of few channels. Where K is large, the inputs dominate and fusing gives
# little. A cast at the end (to float16, as here, or to a narrower type) is an epilogue too: its
# bytes are saved in the same way.
#
# > [!NOTE]
# > These are the bytes that the programs *ask for*. A GPU's caches answer a part of the repeated
# > reads of `a` and `b`, so less reaches the memory chips. The result is written once and is often
# > larger than the cache, so its trips are the real ones. A GPU's profiler shows both figures.

# %% [markdown]
# ## Look inside: the same kernel as machine code
#
# Does the compiler really put the epilogue between the last matrix instruction and the store? Ask
# it. Triton compiles for a GPU that is not there if you name the target: 90 is Hopper, 100 is
# Blackwell. You get **PTX**, NVIDIA's portable assembly, and if the disassembler is at hand, **SASS**,
# what the chip executes.
#
# This process interprets its kernels, so compile in a fresh one. It gets the source of the very
# kernel that ran above.

# %%
COMPILE = """
signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "bias_ptr": "*fp32", "c_ptr": "*fp16"}
signature |= dict.fromkeys(("M", "N", "K"), "i32")
signature |= dict.fromkeys(("BM", "BN", "BK", "FUSED"), "constexpr")
divisible_by_16 = {(position,): [["tt.divisibility", 16]] for position in range(7)}
found = {}
for arch in (90, 100):
    for fused in (False, True):
        constants = {"BM": 128, "BN": 128, "BK": 64, "FUSED": fused}
        source = ASTSource(gemm, signature, constants, divisible_by_16)
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        try:
            sass = kernel.asm["sass"]
        except Exception:  # no disassembler in this build of Triton
            sass = ""
        found[f"sm_{arch} {'fused' if fused else 'plain'}"] = [kernel.asm["ptx"], sass]
print(json.dumps(found))
"""
HEAD = """import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
"""


# %%
def cross_compile() -> dict[str, list[str]]:
    """PTX and SASS of `gemm` for both GPUs, plain and fused."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "compile_gemm.py")
        program.write_text(HEAD + inspect.getsource(gemm.fn) + COMPILE)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = folder
        command = [sys.executable, str(program)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


code = cross_compile()
print({name: f"{len(ptx.splitlines())} lines of PTX" for name, (ptx, _) in code.items()})

# %% [markdown]
# Count what matters in each: matrix instructions, stores to memory, loads from memory into
# registers, and `max`, which is our ReLU. On Hopper the matrix instruction is `wgmma.mma_async`, on
# Blackwell it is `tcgen05.mma`.

# %%
PATTERNS = {
    "matrix": r"wgmma\.mma_async|tcgen05\.mma\.",
    "stores": r"st\.global",
    "loads": r"ld\.global",
    "max": r"max\.f32",
}
counts = {
    name: {what: len(re.findall(pattern, ptx)) for what, pattern in PATTERNS.items()}
    for name, (ptx, _) in code.items()
}
for name, found in counts.items():
    print(f"{name:13}", found)
for gpu in ("sm_90", "sm_100"):
    plain, with_epilogue = counts[f"{gpu} plain"], counts[f"{gpu} fused"]
    assert plain["matrix"] == with_epilogue["matrix"] > 0
    assert plain["stores"] == with_epilogue["stores"]
    assert plain["max"] == 0 and with_epilogue["max"] == 128 * 128 // 128

# %% [markdown]
# The fused kernel has the same matrix instructions and the same stores. It has one more load, the
# bias, and some arithmetic. The number of `max` is no accident: the tile has 128 × 128 elements and
# the kernel runs 128 threads, so each thread owns 128 elements.
#
# (The inputs do not show up as `ld.global`. Both GPUs copy them to shared memory with `cp.async`,
# which passes no register.)
#
# Now see where the epilogue sits. This cell prints the last matrix instruction, the first line of
# the epilogue and the first store, with their line numbers.


# %%
def excerpt(ptx: str, marks: dict[str, str], width: int = 74) -> list[int]:
    """Print the line that each mark names, and return the line numbers."""
    lines = ptx.splitlines()
    numbers = []
    for label, (pattern, which) in marks.items():
        hits = [number for number, line in enumerate(lines) if re.search(pattern, line)]
        numbers.append(hits[which])
        text = " ".join(lines[hits[which]].split())
        short = text if len(text) <= width else text[: width - 1] + "…"
        print(f"{hits[which] + 1:5}  {short}\n       ^ {label}")
    return numbers


MARKS = {
    "the last matrix instruction": (PATTERNS["matrix"], -1),
    "epilogue: add the bias": (r"add\.f32", 0),
    "epilogue: ReLU": (PATTERNS["max"], 0),
    "the first store of the result": (PATTERNS["stores"], 0),
}
for gpu in ("sm_90", "sm_100"):
    print(f"{gpu}, fused:")
    numbers = excerpt(code[f"{gpu} fused"][0], MARKS)
    assert numbers == sorted(numbers)

# %% [markdown]
# Matrix instruction, epilogue, store: in this order, on both GPUs. One thing differs, and it is
# where the accumulator lives. On Hopper the matrix instruction names the registers that hold it, in
# braces. On Blackwell it names an address in **tensor memory**, a store next to the matrix units,
# and the epilogue must first fetch the values with `tcgen05.ld`.

# %%
blackwell = code["sm_100 fused"][0]
numbers = excerpt(
    blackwell,
    {
        "the last matrix instruction": (PATTERNS["matrix"], -1),
        "fetch the accumulator from tensor memory": (r"tcgen05\.ld", 0),
        "epilogue: add the bias, two numbers at once": (r"add\.f32x2", 0),
    },
)
assert numbers == sorted(numbers)
assert "tcgen05.ld" not in code["sm_90 fused"][0]

# %% [markdown]
# The same in SASS, where your Triton has the disassembler. `HGMMA` and `UTCHMMA` are the matrix
# instructions, `FMNMX` is the ReLU, `STG` the store.

# %%
SASS = {"sm_90": r"\bHGMMA", "sm_100": r"\bUTCHMMA"}
for gpu, matrix in SASS.items():
    sass = code[f"{gpu} fused"][1]
    if not sass:
        print(f"skipped: no disassembler for {gpu} in this build of Triton")
        continue
    names = {"matrix": matrix, "relu": r"\bFMNMX", "store": r"\bSTG"}
    found = {what: len(re.findall(pattern, sass)) for what, pattern in names.items()}
    print(f"{gpu}:", found)
    assert found["matrix"] == counts[f"{gpu} fused"]["matrix"]

# %% [markdown]
# ## Break it: a tile does not see the row
#
# An epilogue gets one tile. For bias, activation, scale or cast that is enough, since each element
# needs only itself and its column. A softmax needs the sum of the whole **row**. Put one into the
# epilogue, and see.


# %%
@triton.jit
def gemm_softmax(
    a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (depth[None, :] < K)
        in_b = (depth[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :], mask=in_a, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc)
    weights = tl.exp(acc - tl.max(acc, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    in_c = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], weights.to(tl.float16), mask=in_c)


# %%
for width in (64, 128, 256):
    weights = torch.empty(256, 256, dtype=torch.float16)
    gemm_softmax[(4, 256 // width)](a, b, weights, 256, 256, 64, 64, width, 32)
    print(f"tiles of {width:3} columns: each row sums to {weights.float().sum(1).mean():.2f}")
    tiles_in_row = 256 // width
    assert torch.allclose(
        weights.float().sum(1), torch.full((256,), float(tiles_in_row)), atol=0.01
    )

# %% [markdown]
# No error, wrong numbers: each row sums to the number of tiles in it. Only where one tile spans the
# row is it right, and a tile that wide soon has no room in registers.
#
# A reduction can still be an epilogue, if it is cut into **groups** that lie within a tile. A second,
# small kernel then combines the groups. You write one in the last exercise.

# %% [markdown]
# ## Break it: where the stand-in ends
#
# The interpreter is not the GPU. One difference bites in this very kernel: Triton's interpreter
# multiplies the *bit patterns* of bfloat16 numbers in `tl.dot`, as if they were integers
# ([known](https://github.com/triton-lang/triton/issues/11584)). That is why this lesson uses float16.

# %%
a16, b16 = torch.ones(16, 16, dtype=torch.bfloat16), torch.eye(16, dtype=torch.bfloat16)
wrong = torch.empty(16, 16, dtype=torch.float16)
with np.errstate(over="ignore"):  # the wrong number is beyond float16
    gemm[(1, 1)](a16, b16, bias, wrong, 16, 16, 16, 16, 16, 16, False)
print("1.0 in bfloat16 times the identity gives", wrong[0, 0].item(), "in the interpreter")
print("two bit patterns of 1.0, multiplied:", a16.view(torch.int16)[0, 0].item() ** 2)
assert not torch.equal(wrong.float(), a16.float())

# %% [markdown]
# If your interpreted kernel must take bfloat16, convert with `.to(tl.float32)` before `tl.dot`. Byte
# counts are right either way: the loads happen before.

# %% [markdown]
# ## What NVGEMM does with this
#
# `torch.compile` in its max-autotune mode times kernels from several **backends** and takes the
# fastest. NVGEMM is such a backend. Ask the installed PyTorch which are in the list by default, and
# how many NVGEMM kernels it would time.

# %% tags=["claim"] claim="notes-nvgemm-ten-configs"
from torch._inductor import config as inductor_config

print("backends by default:", inductor_config.max_autotune_gemm_backends)
print("NVGEMM kernels timed per matrix multiply:", inductor_config.nvgemm_max_profiling_configs)
if "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS" not in os.environ:
    assert "NVGEMM" not in inductor_config.max_autotune_gemm_backends
if "TORCHINDUCTOR_NVGEMM_MAX_PROFILING_CONFIGS" not in os.environ:
    assert inductor_config.nvgemm_max_profiling_configs == 10

# %% [markdown]
# It is not in the list, so you must add it. Names in that list are not checked. Here, without a GPU,
# NVGEMM offers nothing, and the error is the same as for a backend that does not exist:


# %% tags=["raises"]
@torch.no_grad()
def compile_with(backends: str) -> None:
    """Compile one product with kernels from `backends` only."""
    torch._dynamo.reset()
    x = torch.randn(32, 32)
    with inductor_config.patch(max_autotune=True, max_autotune_gemm_backends=backends):
        try:
            torch.compile(torch.mm)(x, x)
        except Exception as error:  # torch._inductor.exc.InductorError, a private class
            raise RuntimeError(str(error).partition(" please")[0]) from None


for backends in ("NVGEMM", "NVGEM"):
    with expect_error(RuntimeError, "NoValidChoicesError"):
        compile_with(backends)

# %% [markdown]
# > [!TIP]
# > With `ATEN,NVGEM` there would be no error at all: ATen wins, and you believe that you measured
# > NVGEMM. Spell the name right, and look at the autotuning log.

# %% [markdown]
# ### Watch NVGEMM write an epilogue
#
# The decision what to fuse is plain Python, and so is the code it writes. Before Inductor fuses
# anything, it calls a hook with its list of steps, `config._pre_fusion_custom_pass`. There you can
# ask NVGEMM's own writer, `CutlassEVTCodegen`, for the epilogue of your function. All names with an
# underscore, and these modules, are private: good for looking, not for building on.


# %%
from torch._inductor.codegen.cutlass.python_evt import CutlassEVTCodegen
from torch._inductor.codegen.nv_universal_gemm.nv_universal_gemm_scheduling import (
    NVUniversalGemmScheduling,
)
from torch._inductor.exc import InductorError
from torch._inductor.virtualized import V


def ask_inductor(function: Callable, question: Callable, M: int = 64, N: int = 48) -> object:
    """question(multiply, steps after it), asked while Inductor compiles function(a, b, other)."""
    answers: list[object] = []

    def hook(nodes: list) -> list:
        at = next(i for i, node in enumerate(nodes) if "Extern" in type(node.node).__name__)
        answers.append(question(nodes[at], nodes[at + 1 :]))
        raise InterruptedError("seen enough: no code is needed")

    torch._dynamo.reset()
    a, b, other = torch.randn(M, 32), torch.randn(32, N), torch.randn(M, N)
    inputs = [tensor.half() for tensor in (a, b, other)]
    with inductor_config.patch(_pre_fusion_custom_pass=hook), contextlib.suppress(InductorError):
        torch.compile(function, fullgraph=True, dynamic=False)(*inputs)
    return answers[0]


# %% [markdown]
# The question: what would the writer make of these steps? It raises where it cannot. The two kinds
# of error below are those that NVGEMM's scheduler catches, to leave the step unfused.


# %%
def write_epilogue(multiply, steps: list, keep_product: bool = False) -> str:
    """The epilogue that NVGEMM would hand to CUTLASS, or why it will not."""
    name = multiply.node.get_name()
    gone = V.graph.removed_buffers | (set() if keep_product else {name})
    try:
        return CutlassEVTCodegen.ir_to_evt_python_code(name, steps, gone, "epilogue")[-1]
    except (NotImplementedError, AssertionError) as refusal:
        return f"refused: {type(refusal).__name__} {refusal}"


# %%
def relu_plus(a: torch.Tensor, b: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.mm(a, b)) + other


def gelu_after(a: torch.Tensor, b: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.mm(a, b))


print(ask_inductor(relu_plus, write_epilogue))
print(ask_inductor(gelu_after, write_epilogue))
steps_after = ask_inductor(relu_plus, lambda multiply, steps: len(steps))
assert steps_after == 1, "Inductor has already merged ReLU and addition into one step"

# %% [markdown]
# `accum` is the tile in registers, the `acc` of your kernel. `other` became a further argument,
# under Inductor's name for the third input: a tensor that the epilogue loads, like your bias. `D` is
# what is stored. (The `return` at the margin is as the writer makes it.)
#
# Note the second. Inductor splits GELU into a dozen small steps with `erf`. The writer recognises
# the pattern and folds it back into one call.
#
# In training the backward pass often needs the plain product, too. Then it cannot vanish. Ask for an
# epilogue that keeps it.

# %%
both = ask_inductor(gelu_after, lambda multiply, steps: write_epilogue(multiply, steps, True))
print(both)
assert "tmp_0, D" in both.splitlines()[-1]

# %% [markdown]
# Two results, two stores: `tmp_0` is the product, `D` the output. Such a kernel saves the read of `C`
# but not the write, so half of what you counted above.
#
# Which functions does the writer know? Try some.


# %%
def mish_like(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(torch.exp(x))


EPILOGUES = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "x tanh(exp x)": mish_like,
    "leaky_relu": F.leaky_relu,
    "clamp(0, 6)": lambda x: x.clamp(0, 6),
    "cos": torch.cos,
    "sum of a row": lambda x: x.sum(-1),
}
refusals = {}
for name, epilogue in EPILOGUES.items():
    text = ask_inductor(lambda a, b, other, f=epilogue: f(torch.mm(a, b)), write_epilogue)
    refusals[name] = text.removeprefix("refused: ") if text.startswith("refused") else ""
    print(f"{name:14} {'refused, ' + refusals[name] if refusals[name] else 'written'}")

# %% tags=["claim"] claim="epilogue-fusion-pointwise"
taken = {name for name, refusal in refusals.items() if not refusal}
assert taken == {"relu", "sigmoid", "gelu", "gelu, tanh", "silu", "x tanh(exp x)"}
assert refusals["clamp(0, 6)"] == "NotImplementedError maximum"
assert refusals["leaky_relu"] == "NotImplementedError gt"
assert "Reduction" in refusals["sum of a row"]
decision = inspect.getsource(NVUniversalGemmScheduling._can_fuse_epilogue_impl)
assert "CutlassEVTCodegen.ir_to_evt_python_code(" in decision

# %% [markdown]
# A refusal is no error for you: the step then runs as a kernel of its own. But it shows that
# *pointwise* does not mean *every* pointwise function. A `clamp`, a `leaky_relu`, a comparison: not
# in 2.14.1. The last assert makes sure that this writer is the one that NVGEMM's scheduler tries.
#
# > [!NOTE]
# > Inductor compiled for the CPU here, and you asked NVGEMM's writer about its steps. For a GPU the
# > steps can differ in detail, and the scheduler has further conditions: a matching kernel must
# > exist, and a loaded tensor must be a whole matrix, one row or one column.

# %% [markdown]
# ### Reductions as epilogues
#
# The release text says *pointwise and reduction epilogues*. The writer refused the sum. Reductions
# go another way: a method of the scheduler recognises some of them. Ask it.


# %%
def recognise(multiply, steps: list) -> str:
    plan = NVUniversalGemmScheduling._grouped_reduce_config(multiply.node, steps[0])
    if plan is None:
        return "not recognised"
    return (
        f"{plan.reduction_type} of {plan.source_type}, groups of {plan.group} on axis {plan.axis}"
    )


REDUCTIONS = {
    "max of 16 columns": lambda x: x.view(64, 3, 16).amax(-1),
    "sum of 16 squares": lambda x: x.square().view(64, 3, 16).sum(-1),
    "max of 16 rows": lambda x: x.view(4, 16, 48).amax(1),
    "max of 32 rows": lambda x: x.view(2, 32, 48).amax(1),
    "max of 16 absolute": lambda x: x.abs().view(64, 3, 16).amax(-1),
    "sum of a row": lambda x: x.sum(-1),
}
recognised = {}
for name, reduction in REDUCTIONS.items():
    recognised[name] = ask_inductor(lambda a, b, other, f=reduction: f(torch.mm(a, b)), recognise)
    print(f"{name:20} {recognised[name]}")

# %% [markdown]
# Groups along a row, or of few rows: these fit into a tile. Now the condition that the release
# text does not mention. It stands in the method that has the last word.

# %% tags=["claim"] claim="text-nvgemm-epilogue,epilogue-fusion-grouped"
assert recognised["max of 16 columns"] == "max of identity, groups of 16 on axis 1"
assert recognised["sum of 16 squares"] == "sum of square, groups of 16 on axis 1"
assert recognised["max of 16 rows"] == "max of identity, groups of 16 on axis 0"
for name in ("max of 32 rows", "max of 16 absolute", "sum of a row"):
    assert recognised[name] == "not recognised"

lines = decision.splitlines()
start = next(i for i, line in enumerate(lines) if "scaled_epilogue = " in line)
end = next(i for i, line in enumerate(lines) if "local_reduce is not None:" in line) + 3
print(inspect.cleandoc("\n" + "\n".join(lines[start:end])))
assert "if not scaled_epilogue:" in lines[end - 2] and "return False" in lines[end - 1]

# %% [markdown]
# `local_reduce` is the recognised reduction. It is refused unless every candidate multiplies
# **scaled** matrices. So in 2.14.1 pointwise epilogues fuse after `mm`, `addmm` and `scaled_mm`,
# reductions after `scaled_mm` only. (`scaled_mm` multiplies 8-bit or 4-bit numbers that come with
# scales. The maximum of a group is what you need to quantize its result again.)

# %% [markdown] tags=["instructor"]
# Ask: "You read in a release text that reductions are fused. Your `(a @ b).amax(-1)` in bfloat16 is
# not. Bug?" Let them find the three lines. The point is not NVGEMM but the habit: ask the wheel.
#
# Common wrong answer: "the writer refused the sum, so there are no reductions." There are two ways
# in, and only one was tried.

# %% [markdown]
# ## On the real hardware
#
# On an NVIDIA GPU with `nvidia-cutlass-dsl` and `nvidia-cutlass-operators` installed, this cell
# compiles the layer with NVGEMM and counts the kernels of one call: one if the epilogue was fused,
# more if not.


# %% tags=["hardware"] hardware="cuda"
def kernels_of_one_call() -> int:
    """CUDA kernels that run in one call of the compiled layer."""
    x, weight, bias = (
        torch.randn(s, device="cuda").bfloat16() for s in ((512, 256), (256, 512), 512)
    )

    def step(x):
        return torch.relu(torch.addmm(bias, x, weight))

    with inductor_config.patch(max_autotune=True, max_autotune_gemm_backends="ATEN,NVGEMM"):
        compiled = torch.compile(step)
        compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.self_device_time_total)


if torch.cuda.is_available():
    print("kernels in one call:", kernels_of_one_call())
else:
    print("skipped: needs an NVIDIA GPU and nvidia-cutlass-dsl; shows the kernels of one call")

# %% [markdown] tags=["instructor"]
# Before the count of saved bytes, let everybody write down a guess for K = 64 and for K = 4096, then
# show the second figure. Most people guess that fusing always halves the traffic.
#
# Common wrong answers: "larger tiles make fusion matter less" (the share grows, since the inputs
# shrink); "fusing saves arithmetic" (it saves none); "the cache would hold the result" (ask for its
# size in MB, against the L2 of a GPU that they use).
#
# Timing: problem and fusion 10 minutes, prediction 10, machine code 10, limits and NVGEMM 10. With
# little time, leave out SASS.

# %% [markdown]
# ## Your turn
#
# ### Exercise: what would it save?
#
# Your layer is a matrix multiply in float16, then a chain of elementwise kernels, each of which reads
# the result and writes it: bias, GELU, dropout and so on. Write `saved(m, n, steps)`: the bytes saved
# if all `steps` of them become one epilogue. Then write `worth_it(m, n, k, steps, tile)`: whether that
# is at least a quarter of the bytes that the unfused layer moves. Leave the bias out of the count.


# %% tags=["exercise"] exercise="what-would-it-save" difficulty=1 minutes=8
def saved(m: int, n: int, steps: int) -> int:
    """Bytes of float16 that fusing `steps` elementwise kernels saves."""
    raise NotImplementedError


def worth_it(m: int, n: int, k: int, steps: int, tile: tuple[int, int, int]) -> bool:
    """Whether fusing saves at least a quarter of the bytes of the unfused layer."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# How many times does the unfused layer write the result, and how many times does it read it? The
# inputs are in `predicted_bytes`; take the bias out.


# %% tags=["solution"]
def saved(m: int, n: int, steps: int) -> int:
    """Bytes of float16 that fusing `steps` elementwise kernels saves."""
    return steps * 2 * (2 * m * n)  # each step reads and writes the result once


def worth_it(m: int, n: int, k: int, steps: int, tile: tuple[int, int, int]) -> bool:
    """Whether fusing saves at least a quarter of the bytes of the unfused layer."""
    bm, bn, _ = tile
    inputs = 2 * k * (m * triton.cdiv(n, bn) + n * triton.cdiv(m, bm))
    fused_bytes = inputs + 2 * m * n
    return saved(m, n, steps) >= (fused_bytes + saved(m, n, steps)) / 4


# %% tags=["check"]
for shape in ((256, 256, 64), (130, 70, 50)):
    one, two = (layer(*operands(*shape), fused=is_fused)[1] for is_fused in (True, False))
    difference = two.loaded + two.stored - one.loaded - one.stored
    assert saved(*shape[:2], 1) == difference
assert saved(100, 10, 3) == 3 * saved(100, 10, 1) == 12_000
assert worth_it(4096, 4096, 128, 1, (128, 128, 64))
assert not worth_it(4096, 4096, 4096, 1, (128, 128, 64))
assert worth_it(1000, 1000, 300, 3, (64, 64, 32)) and not worth_it(1000, 1000, 300, 1, (32, 32, 32))
print("what-would-it-save: correct")

# %% [markdown]
# ### Exercise: a residual in the epilogue
#
# In a transformer, a residual is added at the end: `relu(a @ b + bias) + residual`, all of it float16
# but the bias. Write the epilogue. Think about what its bytes must be: the residual is a new input,
# and somebody has to read it.
#
# The kernel below has everything but the epilogue. It must be right at ragged edges.


# %% tags=["exercise"] exercise="residual-epilogue" difficulty=2 minutes=12
@triton.jit
def gemm_residual(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (depth[None, :] < K)
        in_b = (depth[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :], mask=in_a, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc)
    in_c = (rows[:, None] < M) & (cols[None, :] < N)
    where = rows[:, None] * N + cols[None, :]
    # ... your epilogue ...
    tl.store(c_ptr + where, acc.to(tl.float16), mask=in_c)


# %% [markdown] tags=["hint"]
# The residual has the shape of the result, so it is loaded with `where` and `in_c`. Add in float32,
# after the ReLU.


# %% tags=["solution"]
@triton.jit
def gemm_residual(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (depth[None, :] < K)
        in_b = (depth[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :], mask=in_a, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc)
    in_c = (rows[:, None] < M) & (cols[None, :] < N)
    where = rows[:, None] * N + cols[None, :]
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    residual = tl.load(residual_ptr + where, mask=in_c, other=0.0).to(tl.float32)
    acc = tl.maximum(acc + bias[None, :], 0.0) + residual
    tl.store(c_ptr + where, acc.to(tl.float16), mask=in_c)


# %% tags=["check"]
m, n, k = 130, 70, 50
tile = (64, 32, 16)
a_check, b_check, bias_check = operands(m, n, k)
residual, out = torch.randn(m, n).half(), torch.empty(m, n, dtype=torch.float16)
grid = (triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1]))
with ByteCounter() as counted:
    gemm_residual[grid](a_check, b_check, bias_check, residual, out, m, n, k, *tile)
wanted = torch.relu(a_check.float() @ b_check.float() + bias_check) + residual.float()
assert torch.allclose(out.float(), wanted, atol=1e-2), "the numbers are wrong"
assert counted.loaded + counted.stored == predicted_bytes(m, n, k, tile, fused=True) + 2 * m * n
print("residual-epilogue: correct")

# %% [markdown]
# ### Exercise: a row maximum, without storing the product
#
# For a quantised layer you need the largest value of every row of `a @ b`, and not the product
# itself. Turn it into a grouped reduction: each program stores the maximum of each of its rows into
# `partial`, a float32 matrix with one column a tile. A `partial.amax(1)` outside finishes the work.
#
# The check uses a product that is negative everywhere, with a ragged last tile. Find out why that is
# the hard case.


# %% tags=["exercise"] exercise="row-maximum" difficulty=3 minutes=15
@triton.jit
def gemm_row_max(
    a_ptr, b_ptr, partial_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (depth[None, :] < K)
        in_b = (depth[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :], mask=in_a, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc)
    # ... your epilogue; tl.num_programs(1) is the number of tiles in a row, tl.where(mask, x, y) ...


# %% [markdown] tags=["hint"]
# The columns beyond N were loaded as zeros, so the accumulator is zero there, and zero is more than
# any negative number. What must stand there instead, before `tl.max(acc, 1)`?


# %% tags=["solution"]
@triton.jit
def gemm_row_max(
    a_ptr, b_ptr, partial_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (depth[None, :] < K)
        in_b = (depth[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :], mask=in_a, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc)
    acc = tl.where(cols[None, :] < N, acc, float("-inf"))  # what is beyond N must never win
    where = rows * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial_ptr + where, tl.max(acc, 1), mask=rows < M)


# %% tags=["check"]
m, n, k, tile = 100, 70, 40, (32, 32, 16)
a_check, b_check, _ = operands(m, n, k)
b_check = -b_check.abs()
tiles_across = triton.cdiv(n, tile[1])
for left in (a_check, a_check.abs()):
    partial = torch.full((m, tiles_across), float("nan"))
    with ByteCounter() as counted:
        gemm_row_max[(triton.cdiv(m, tile[0]), tiles_across)](
            left, b_check, partial, m, n, k, *tile
        )
    wanted = (left.float() @ b_check.float()).amax(1)
    assert torch.allclose(partial.amax(1), wanted, atol=1e-2), "the maxima are wrong"
    assert counted.stored == 4 * m * tiles_across, "store one number for each row and tile"
print(f"row-maximum: correct, {counted.stored:,} bytes stored instead of {2 * m * n:,}")

# %% [markdown]
# ## Check yourself

# %% [markdown] tags=["quiz"]
# You double both sides of the tile. What happens to the bytes that fusing bias and ReLU saves?
#
# - [ ] They halve.
#   > The inputs are read half as often. The trips of the result do not depend on the tile.
# - [x] They stay the same.
#   > One write and one read of the result, at every tile size: the gap in the first figure.
# - [ ] They double.
#   > Look at the first figure again: the gap between the bars does not change.

# %% [markdown] tags=["quiz"]
# Which of these can be an elementwise epilogue of a GEMM with tiles of 128 × 128 and N = 4096?
#
# - [ ] Softmax over the row.
#   > It needs all 4096 columns, and the tile has 128 of them. Rows would sum to the number of tiles.
# - [x] Multiply by a scale per column, then cast to float16.
#   > Each element needs itself and its column's scale: both are at hand in the tile.
# - [ ] Layer norm over the row.
#   > Mean and variance need the whole row.

# %% [markdown] tags=["quiz"]
# On which layer does fusing save the largest share of the bytes?
#
# - [ ] M = N = 4096, K = 4096.
#   > Here the inputs dominate. The second figure is near zero at the right.
# - [ ] M = N = 4096, K = 1024.
#   > Better, but the inputs are still read many times for each trip of the result.
# - [x] M = N = 4096, K = 64.
#   > The result is large against the inputs, so its extra trips are most of the traffic.

# %% [markdown] tags=["quiz"]
# You set the backends to `ATEN,NVGEM` and see no speed-up and no error. What now?
#
# - [ ] NVGEMM was timed and lost.
#   > It was not even tried: the name lacks an M, and names are not checked.
# - [x] Correct the name, and look for NVGEMM among the timed kernels in the autotuning log.
#   > As long as another backend offers a kernel, a misspelled one goes unnoticed.
# - [ ] Raise the number of profiled configurations.
#   > A higher limit for a backend that is not in the list changes nothing.

# %% [markdown] tags=["quiz"]
# A compiled layer with a fused epilogue differs from eager in the last bit of some float16 results.
# Why?
#
# - [ ] The GPU adds in a random order.
#   > Not needed to explain it: you saw it on a CPU, in a fixed order.
# - [x] Eager rounds the product to float16 before it adds the bias. The fused kernel does not.
#   > One rounding instead of two, so the mean error was smaller above.
# - [ ] The fused kernel has a bug.
#   > Compare both with float64: the fused one is nearer.
