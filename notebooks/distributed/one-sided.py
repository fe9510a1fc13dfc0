# ---
# jupyter:
#   course:
#     title: "One-sided: use a peer's memory without its help"
#     summary: Read and write memory of other ranks, know when that wins, and what keeps it correct.
#     minutes: 35
#     level: deeper
#     objectives:
#       - Say what a window and symmetric memory offer, and what this machine answers.
#       - Build a stand-in on shared memory, and count its bytes against all_gather and all_to_all.
#       - Order a put with a signal, and show a torn read without one.
#       - Let many ranks write into one buffer without overwriting each other.
#       - Run the checks of symmetric memory's own get, and read its errors.
#     prerequisites: []
#     job: {function: two_sided, ranks: 4, arguments: {count: 8}}
#     features:
#       rma-windows: stand-in
#       symm-mem-get: stand-in
#       sec-symm-mem-bounds: stand-in
#       symm-mem-nccl-fixes: inspect
#       symm-mem-docs-collectives: inspect
#       symm-mem-copy-engine: inspect
#       symm-mem-rendezvous: inspect
#       xpu-symmetric-memory: inspect
#     keypoints:
#       - In a two-sided exchange both sides must call. In a one-sided one only one does.
#       - One-sided wins when a rank needs little, irregularly, and the owner is busy.
#       - Nothing orders a put and a read by itself. The signal comes after the put.
#       - Two puts to one place are lost data without an error, so give each writer its own place.
#       - The window has put, signals and a mapped view, and no get. Symmetric memory has a get.
#       - All of it needs CUDA or XPU in 2.14.1. Gloo refuses, with an error.
#     sources:
#       - title: PyTorch 2.14 release blog, One-Sided (RMA) Window APIs
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #186299, the window interface"
#         url: https://github.com/pytorch/pytorch/pull/186299
#       - title: "PR #189360, windows for nccl2"
#         url: https://github.com/pytorch/pytorch/pull/189360
#       - title: "PR #182378, the get of symmetric memory"
#         url: https://github.com/pytorch/pytorch/pull/182378
#       - title: "PR #189941, the NCCL backend of symmetric memory"
#         url: https://github.com/pytorch/pytorch/pull/189941
#       - title: "PR #192515, how to reach NCCL's symmetric kernels"
#         url: https://github.com/pytorch/pytorch/pull/192515
#         date: 2026-08-07
#       - title: "PR #185102, symmetric memory on XPU"
#         url: https://github.com/pytorch/pytorch/pull/185102
#       - title: "PR #191596, symmetric memory checks peers and channels"
#         url: https://github.com/pytorch/pytorch/pull/191596
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C import _distributed_c10d as c10d

from course.kit import (
    BLUE,
    GREEN,
    ORANGE,
    expect_error,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()


# %% [markdown]
# A collective is a meeting: all ranks must come, and the slowest decides when it ends.
# **One-sided** communication is a letter box: a rank reads or writes memory of another one, and the
# other one does nothing. PyTorch 2.14 has two interfaces for that, *windows* and *symmetric
# memory*. In this lesson you use both shapes, and meet the bugs that come with them.
#
# > [!NOTE]
# > The release text calls both **API Unstable**: names and behaviour may change in any later
# > release.
# > `_new_window` and `torch.distributed._symmetric_memory` are private too.
#
# > [!WARNING]
# > The real backends need CUDA or XPU, and this page was made without. What runs here is a
# > **stand-in** on shared memory of one machine. It has the shape of the real interface, so you
# > learn to write correct programs with it. Its times say nothing about a GPU.
#
# Some words first. A **rank** is one process of the job, and also its number. **RMA**, remote
# memory access, is another name for one-sided. A **window** is a tensor that others may access.
# **Gloo** is the backend that PyTorch uses between CPUs.

# %% [markdown]
# ## The problem: a look-up that waits
#
# A large embedding table is spread over four ranks by rows. Rank 0 needs a few rows, and most of
# them lie elsewhere. With collectives there are two ways:
#
# - `all_gather` the whole table, and throw most of it away;
# - rounds of `all_to_all`: how many rows from whom, the row numbers, then the rows.
#
# In both, all ranks must take part, also those who need nothing. Here rank 3 is busy for a second.

# %%
ROWS, WIDTH, WORLD = 4096, 64, 4  # the table: rows in all, numbers in a row, ranks
PER_RANK = ROWS // WORLD
BUSY = 1.0  # seconds


def own_rows(rank: int) -> torch.Tensor:
    """The rows of one rank. Row number n holds n everywhere, so that a check is easy."""
    first = rank * PER_RANK
    return torch.arange(first, first + PER_RANK).float()[:, None].repeat(1, WIDTH)


def wanted_rows(rank: int, count: int) -> torch.Tensor:
    """`count` row numbers, drawn from the whole table."""
    return torch.randint(ROWS, (count,), generator=torch.Generator().manual_seed(rank))


# %%
def ask_all(wanted: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The wanted rows, by rounds in which every rank takes part."""
    order = wanted.argsort(stable=True)  # by owner, as the table is cut by rows
    asking = torch.bincount(wanted // PER_RANK, minlength=WORLD)
    asked = torch.empty_like(asking)
    dist.all_to_all_single(asked, asking)
    ids = torch.empty(int(asked.sum()), dtype=torch.long)
    dist.all_to_all_single(ids, wanted[order], asked.tolist(), asking.tolist())
    rows = torch.empty(len(wanted), WIDTH)
    found = mine[ids - dist.get_rank() * PER_RANK]
    dist.all_to_all_single(rows, found, asking.tolist(), asked.tolist())
    result = torch.empty_like(rows)
    result[order] = rows
    return result


def two_sided(count: int) -> None:
    dist.init_process_group("gloo")
    rank, mine = dist.get_rank(), own_rows(dist.get_rank())
    wanted = wanted_rows(rank, count)
    ask_all(wanted, mine)  # once before: connections are made at first use
    dist.barrier()
    started = time.monotonic()
    if rank == 3:
        time.sleep(BUSY)
    rows = ask_all(wanted, mine)
    report("rows", seconds=time.monotonic() - started, right=bool((rows[:, 0] == wanted).all()))
    dist.barrier()


# %%
asked = run_ranks(two_sided, WORLD, count=8, quiet=True).events("rows")
print(f"rank 0 waited {asked[0]['seconds']:.2f} s, as rank 3 was busy for {BUSY:.2f} s")
assert all(rank["right"] for rank in asked.values())
assert asked[0]["seconds"] > BUSY / 2

# %% [markdown]
# ## What there is, and what this machine answers
#
# A window is made by a collective call on a group. Which methods has it?

# %% tags=["claim"] claim="article-rma-windows,text-rma-nccl2"
methods = [name for name in dir(c10d.Window) if not name.startswith("_")]
print("a window has:", ", ".join(methods))
assert {"put", "signal", "wait_signal", "map_remote_tensor"} <= set(methods)
assert "get" not in methods, "the release text speaks of get, the class has none"
print(inspect.signature(dist._new_window))

# %% [markdown]
# | method | does |
# |---|---|
# | `tensor_register`, `tensor_deregister` | makes a tensor the window's memory. All ranks call it together |
# | `put` | writes a tensor into a peer's window, from an element on |
# | `map_remote_tensor` | gives a tensor that *is* the peer's memory, if it can be reached so |
# | `signal`, `wait_signal` | tells a peer something, and waits for that |
#
# The release text says "put and get". In 2.14.1 the class has no `get`: you read through the mapped
# tensor. And on a CPU?

# %%
loopback = "lo" if sys.platform == "linux" else "lo0"
os.environ["GLOO_SOCKET_IFNAME"] = loopback
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("Gloo has windows:", dist._supports_window())
assert not dist._supports_window()

# %% tags=["raises"]
with expect_error(RuntimeError, match="gloo does not support new_window"):
    dist._new_window(torch.zeros(4))

# %% tags=["raises"]
with expect_error(RuntimeError, match="does not support device type cpu"):
    symm_mem.empty(4, device="cpu")

# %% [markdown]
# Both refuse clearly. In a program of yours, ask `_supports_window()` first, and keep the two-sided
# way for the case that it says no.
#
# ## The smallest thing that works
#
# So build a stand-in. Processes of one machine can share memory through a file. Each rank has a
# file for its tensor, and one for its **signal pad**: a counter for each peer, which only that peer
# raises. `torch.from_file(..., shared=True)` turns a file into a tensor without a copy.


# %%
class SharedWindow:
    """A stand-in for torch's Window, for float tensors of ranks on one machine."""

    def __init__(self, folder: str, tensor: torch.Tensor, rank: int, world: int) -> None:
        self.rank, self.world, self.sent, self.messages = rank, world, 0, 0
        self.seen = [0] * world
        self.memory = [
            self.shared(folder, "data", peer, len(tensor.view(-1))) for peer in range(world)
        ]
        self.pads = [self.shared(folder, "pad", peer, world) for peer in range(world)]
        self.shape = tensor.shape
        self.memory[rank].copy_(tensor.view(-1))

    def shared(self, folder: str, kind: str, peer: int, size: int) -> torch.Tensor:
        """The memory of a peer: the same file for all ranks."""
        return torch.from_file(f"{folder}/{kind}-{peer}", shared=True, size=size)

    def put(self, tensor: torch.Tensor, peer: int, offset: int) -> None:
        """Write into the window of a peer, from element `offset` on. The peer does nothing."""
        self.memory[peer][offset : offset + tensor.numel()] = tensor.reshape(-1)
        self.count(peer, tensor.numel())

    def map_remote_tensor(self, peer: int) -> torch.Tensor:
        """The peer's memory itself. Reading from it costs what you read."""
        return self.memory[peer].view(self.shape)

    def signal(self, peer: int) -> None:
        """Tell a peer that what was put before is there."""
        self.pads[peer][self.rank] += 1  # only this rank writes here
        self.count(peer, 1)

    def wait_signal(self, peer: int, seconds: float = 20.0) -> None:
        """Wait until the peer has sent one more signal than was waited for so far."""
        end, pad = time.monotonic() + seconds, self.pads[self.rank]
        while pad[peer] <= self.seen[peer]:
            if time.monotonic() > end:
                raise TimeoutError(f"no signal from rank {peer} in {seconds:g} s")
            time.sleep(0.0005)
        self.seen[peer] += 1

    def count(self, peer: int, elements: int) -> None:
        """Note what would have travelled to or from another rank."""
        if peer != self.rank:
            self.sent, self.messages = self.sent + 4 * elements, self.messages + 1


# %% [markdown]
# Making the window is a collective act, as in the original: all ranks need the memory of all others
# to be there. A barrier does that. Files that do not exist yet are made, and begin with zeros.
#
# The look-up then needs nobody. It groups the row numbers by owner, and reads.


# %%
def look_up(window: SharedWindow, wanted: torch.Tensor) -> torch.Tensor:
    """The wanted rows, read from their owners' memory."""
    result = torch.empty(len(wanted), WIDTH)
    owner = wanted // PER_RANK
    for peer in owner.unique().tolist():
        mine = owner == peer
        result[mine] = window.map_remote_tensor(peer)[wanted[mine] - peer * PER_RANK]
        window.count(peer, int(mine.sum()) * WIDTH)
    return result


def one_sided(folder: str, counts: list[int]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    window = SharedWindow(folder, own_rows(rank), rank, WORLD)
    dist.barrier()
    started = time.monotonic()
    if rank == 3:
        time.sleep(BUSY)
    for count in counts:
        window.sent = window.messages = 0
        wanted = wanted_rows(rank, count)
        right = bool((look_up(window, wanted)[:, 0] == wanted).all())
        seconds = time.monotonic() - started
        report("rows", count=count, seconds=seconds, right=right, sent=window.sent)
    dist.barrier()


# %%
COUNTS = [1, 8, 64, 512, 4096]
with tempfile.TemporaryDirectory(prefix="window-") as folder:
    fetched = run_ranks(one_sided, WORLD, folder=folder, counts=COUNTS, quiet=True)
found = [entry for entry in fetched.reports[0] if entry["event"] == "rows"]
print(f"rank 0 had all its rows after {found[-1]['seconds']:.2f} s; rank 3 was busy")
assert all(entry["right"] for entry in found)
assert found[-1]["seconds"] < BUSY / 2 < asked[0]["seconds"], "nobody waited for rank 3"

# %% [markdown]
# ## Measure it: bytes
#
# How much travels to rank 0? For one-sided the window counted it. For `all_gather` it is the rest
# of the table, always. For `all_to_all` it is the rows, and the numbers that ask for them.

# %%
gather_bytes = 4 * WIDTH * (ROWS - PER_RANK)
print(f"{'rows':>5} {'one-sided':>10} {'all_to_all':>11} {'all_gather':>11}  bytes for rank 0")
lines = []
for entry in found:
    remote = int((wanted_rows(0, entry["count"]) // PER_RANK != 0).sum())
    asking = 8 * (remote + WORLD - 1)  # the row numbers that leave, and how many they are
    assert entry["sent"] == 4 * WIDTH * remote
    lines.append((entry["count"], entry["sent"], entry["sent"] + asking, gather_bytes))
    print(f"{lines[-1][0]:>5} {lines[-1][1]:>10} {lines[-1][2]:>11} {lines[-1][3]:>11}")
assert lines[1][1] < gather_bytes / 100, "for few rows, all_gather sends far too much"

# %%
fig, ax = plt.subplots(figsize=(7, 3))
looks = [
    ("one-sided", BLUE, "o", "-"),
    ("all_to_all", ORANGE, "s", "--"),
    ("all_gather", GREEN, "^", ":"),
]
for column, (name, colour, marker, style) in enumerate(looks, start=1):
    heights = [max(line[column], 1) for line in lines]
    ax.plot(COUNTS, heights, style, color=colour, marker=marker, label=name)
ax.set(xscale="log", yscale="log", xlabel="rows that rank 0 needs", ylabel="bytes for rank 0")
ax.legend()
show(
    fig,
    alt="Bytes for rank 0 over the number of rows it needs, both on logarithmic axes. all_gather is "
    "constant. One-sided and all_to_all grow in proportion and lie close together, far below it for few rows.",
)

# %% [markdown]
# One-sided and `all_to_all` send nearly the same bytes. The difference is not the bytes. It is
# **who has to come**: the other ranks wrote no code for this look-up and spent no time on it.
#
# So prefer one-sided when a rank needs little, at moments of its own, and owners are busy. When all
# ranks exchange much at the same moment, a collective is as good, and simpler.

# %% [markdown] tags=["instructor"]
# Before the table, let the room guess: how do one-sided and `all_to_all` compare in bytes?
#
# Most expect one-sided to send less. It sends the same rows. Ask what else could be the gain, and
# let somebody find "the owner need not call". Eight minutes.

# %% [markdown]
# ## Break it: no signal, torn data
#
# Weight transfer is the other common use: a trainer puts new weights into the memory of an
# inference rank, which goes on serving. Nothing orders a `put` and a read. Below, the trainer
# writes version 2 in two halves, as a network does with anything large. The reader looks in
# between. To make that happen each time, the trainer waits between the halves.


# %%
def transfer(folder: str, use_signal: bool) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), 1000
    window = SharedWindow(folder, torch.full((size,), 1.0), rank, 2)
    dist.barrier()
    if rank == 0:
        window.put(torch.full((size // 2,), 2.0), 1, 0)
        dist.barrier()  # half is there
        if not use_signal:
            dist.barrier()  # let the reader look now, so that you see in every run what it may see
        window.put(torch.full((size // 2,), 2.0), 1, size // 2)
        window.signal(1)
    else:
        dist.barrier()
        if use_signal:
            window.wait_signal(0)
        report("read", versions=window.map_remote_tensor(1).unique().tolist())
        if not use_signal:
            dist.barrier()
    dist.barrier()


# %%
versions = {}
for use_signal in (False, True):
    with tempfile.TemporaryDirectory(prefix="window-") as folder:
        transferred = run_ranks(transfer, 2, folder=folder, use_signal=use_signal, quiet=True)
    versions[use_signal] = transferred.events("read")[1]["versions"]
    print(f"with signal: {use_signal!s:5}  versions in the weights: {versions[use_signal]}")
assert versions == {False: [1.0, 2.0], True: [2.0]}

# %% [markdown]
# Without the signal half of the network is old and half is new, and no error is raised. With it the
# reader starts when all is there. The rule: **all puts first, then the signal**, and the reader
# waits for the signal before it looks.
#
# A signal in the other direction is needed as well. Before the trainer writes version 3, it must
# know that the reader is done with version 2. Otherwise it tears what is being read.
#
# ### Two writers, one place
#
# Expert routing is the third use: each rank puts its tokens into the memory of the rank that holds
# the expert. Where? If each writer starts at 0, the last one wins.

# %%
with tempfile.TemporaryDirectory(prefix="window-") as folder:
    first, second = (SharedWindow(folder, torch.zeros(8), rank, 2) for rank in (0, 1))
    first.put(torch.full((4,), 10.0), peer=1, offset=0)
    second.put(torch.full((3,), 20.0), peer=1, offset=0)
    clash = second.map_remote_tensor(1).tolist()
print("seven numbers were put, there are:", clash)
assert clash.count(10.0) == 1, "three of the first writer's four are gone"
del first, second

# %% [markdown]
# No error here either. A real window gives you none as well: it writes where you say. Who writes
# where must be settled before, and that is your second exercise.
#
# ## The get of symmetric memory
#
# **Symmetric memory** is the other interface: every rank allocates a tensor of the same size in a
# special pool, and a `rendezvous` makes all of them reachable. In 2.14 it has the `get` that
# windows lack.
#
# Most of that `get` is Python, and its last step asks the handle for a peer's buffer. So the real
# function runs here, if a stand-in plays the handle. Only the question "which backend?" must be
# answered for it.


# %%
class SharedHandle:
    """What `get` uses of a symmetric-memory handle, on top of the shared window."""

    device, offset = torch.device("cpu"), 0

    def __init__(self, window: SharedWindow) -> None:
        self.window, self.world_size = window, window.world
        self.buffer_size = window.memory[0].numel() * 4  # bytes

    def get_buffer(self, peer: int, sizes: tuple, dtype: torch.dtype, offset: int) -> torch.Tensor:
        """A view of a peer's memory."""
        flat = self.window.memory[peer].view(dtype)
        return flat[offset : offset + sizes[0]].view(sizes)


def get(destination: torch.Tensor, handle: SharedHandle, peer: int, offset: int = 0) -> None:
    """torch's own get, told that its backend is the one that copies from a mapped buffer."""
    with mock.patch.object(symm_mem, "get_backend", return_value="CUDA"):
        symm_mem.get(destination, handle, peer, offset)


# %% tags=["claim"] claim="text-symm-mem-get"
pool = tempfile.TemporaryDirectory(prefix="window-")
peers = [SharedWindow(pool.name, torch.arange(6.0) + 100 * rank, rank, 3) for rank in range(3)]
handle, destination = SharedHandle(peers[0]), torch.zeros(2)
get(destination, handle, peer=2, offset=3)
print("two numbers of rank 2, from its fourth on:", destination.tolist())
assert destination.tolist() == [203.0, 204.0]

# %% [markdown]
# `offset` counts elements, and the size of the destination says how many. Now its checks. They are
# what stands between a wrong index and somebody else's memory, and they are new.

# %% tags=["raises"]
with expect_error(ValueError, match="invalid peer"):
    get(destination, handle, peer=3)

# %% tags=["raises"]
with expect_error(ValueError, match="exceeds symmetric allocation"):
    get(destination, handle, peer=1, offset=5)

# %% tags=["raises"]
with expect_error(ValueError, match="contiguous"):
    get(torch.zeros(4)[::2], handle, peer=1)

# %% [markdown]
# What is the real thing without the patch? It looks for a backend of the device, and a CPU has
# none.

# %% tags=["raises"]
with expect_error(ValueError, match="unsupported backend: None"):
    symm_mem.get(destination, handle, 1)

# %%
peers = handle = None  # the files are mapped until here
pool.cleanup()
dist.destroy_process_group()

# %% [markdown]
# ## On real hardware
#
# Nothing below was run. The sources that ship with 2.14.1 say what exists, and the cell reads them.

# %% tags=["claim"] claim="text-symm-mem-fixes,text-xpu-symm-mem"
source = inspect.getsource(symm_mem)
facts = {
    "an all_gather by copy engine and multicast": "_low_contention_all_gather_ce_multicast"
    in source,
    "operators registered for XPU": source.count('"XPU")') > 3,
    "rendezvous says not to use it in a hot path": "hot code paths" in symm_mem.rendezvous.__doc__,
    "NVSHMEM, NCCL and CUDA in get": all(
        name in inspect.getsource(symm_mem.get) for name in ('"NVSHMEM"', '"NCCL"', '"CUDA"')
    ),
    "a handle has barrier and signals": {"barrier", "put_signal", "wait_signal"}
    <= set(dir(c10d._SymmetricMemory)),
}
for fact, holds in facts.items():
    print(f"{holds!s:6}{fact}")
assert all(facts.values())

# %% [markdown]
# | you have | you can use | needs |
# |---|---|---|
# | NVIDIA, `nccl2` | windows: `put`, `map_remote_tensor`, signals | a GPU for each rank |
# | NVIDIA, one machine | symmetric memory, backend CUDA: `get`, signals | peer access between the GPUs |
# | NVIDIA, many machines | symmetric memory, backend NVSHMEM or NCCL | GPUDirect RDMA |
# | Intel GPUs | symmetric memory on XPU, for async tensor parallelism | XPU build |
# | AMD, Apple, CPU | collectives | |
#
# Three more things from the release text, none of them tried here:
#
# - Ordinary collectives can reach NCCL's faster *symmetric kernels*, if their tensors come from a
#   registered pool or had a rendezvous. By the documentation only `all_gather` and float sums qualify;
#   the rest falls back without a word, and `NCCL_DEBUG_SUBSYS=TUNING` shows which one ran.
# - NCCL's symmetric memory got `barrier()`, and its signal pad lies at the front of a block,
#   zeroed.
# - The multicast rendezvous may go through the process group in place of the store.


# %%
def get_on_gpus() -> None:
    rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    tensor = symm_mem.empty(4, device=device).fill_(rank)
    memory = symm_mem.rendezvous(tensor, dist.group.WORLD)
    memory.barrier(channel=0)
    result = torch.empty(4, device=device)
    symm_mem.get(result, memory, (rank + 1) % dist.get_world_size())
    memory.barrier(channel=0)
    print(f"rank {rank} got {result.tolist()}")


def start_on_gpus() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    get_on_gpus()
    dist.destroy_process_group()


# %% tags=["hardware"] hardware="cuda"
if torch.cuda.device_count() < 2:
    print("skipped: symmetric memory needs one CUDA GPU per rank, two in all; there are fewer")
else:
    run_ranks(start_on_gpus, 2)

# %% [markdown]
# ## Your turn
#
# ### Exercise: plan the reads
#
# One read of five rows costs less than five reads of one row. Write `plan(wanted, per_rank)`. It
# takes a list of row numbers, possibly with repeats, and returns a dictionary: owner to the
# ascending list of its **local** row numbers, each once.


# %% tags=["exercise"] exercise="plan-reads" difficulty=1 minutes=5
def plan(wanted: list[int], per_rank: int) -> dict[int, list[int]]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `divmod(row, per_rank)` gives the owner and the local number at once. A set drops repeats.


# %% tags=["solution"]
def plan(wanted: list[int], per_rank: int) -> dict[int, list[int]]:
    reads: dict[int, list[int]] = {}
    for row in sorted(set(wanted)):
        owner, local = divmod(row, per_rank)
        reads.setdefault(owner, []).append(local)
    return reads


# %% tags=["check"]
assert plan([7, 3, 7, 12], 4) == {0: [3], 1: [3], 3: [0]}
assert plan([], 4) == {}
assert plan([9, 8, 8, 11, 8], 4) == {2: [0, 1, 3]}
print("plan-reads: correct")


# %% [markdown]
# ### Exercise: a place for every writer
#
# Rank `r` sends `counts[r][e]` tokens to expert `e`, and expert `e` lives on rank `e`. All ranks
# know `counts`, for instance by a small `all_gather`. Write `places(counts)`: it returns a table of
# the same shape with the **offset in tokens** at which rank `r` writes into the window of `e`, so
# that all tokens lie side by side, in the order of ranks, and nothing is overwritten.


# %% tags=["exercise"] exercise="writer-places" difficulty=2 minutes=8
def places(counts: list[list[int]]) -> list[list[int]]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# For one expert: rank 0 begins at 0, rank 1 where rank 0 ends, and so on. That is a running sum
# that leaves out the own count.


# %% tags=["solution"]
def places(counts: list[list[int]]) -> list[list[int]]:
    table = torch.tensor(counts)
    return (table.cumsum(0) - table).tolist()


# %% tags=["check"]
tokens_of = [[2, 0, 3], [1, 4, 0], [0, 2, 2]]
with tempfile.TemporaryDirectory(prefix="window-") as folder:
    windows = [SharedWindow(folder, torch.full((8,), -1.0), rank, 3) for rank in range(3)]
    where = places(tokens_of)
    for rank in (2, 0, 1):  # the order in which they write must not matter
        for expert, count in enumerate(tokens_of[rank]):
            windows[rank].put(torch.full((count,), float(rank)), expert, where[rank][expert])
    arrived = [windows[0].map_remote_tensor(expert).tolist() for expert in range(3)]
    del windows
assert arrived[0] == [0, 0, 1, -1, -1, -1, -1, -1]
assert arrived[1] == [1, 1, 1, 1, 2, 2, -1, -1]
assert arrived[2] == [0, 0, 0, 2, 2, -1, -1, -1]
print("writer-places: correct")


# %% [markdown]
# ### Exercise: never torn, never waiting
#
# An inference rank must not wait for the trainer, and the trainer not for it. Then a signal is of
# no use: the reader looks when it likes. But it must not use torn weights.
#
# The trainer keeps a version next to the weights. It makes the version odd, writes the weights, and
# makes it even again. Write `read_whole(version, copy)`. `version()` reads the number from the
# trainer's memory, `copy()` makes a copy of the weights, and takes long. Return a copy that is
# whole for sure, and its version. Copy no more often than you must.


# %% tags=["exercise"] exercise="never-torn" difficulty=3 minutes=12
def read_whole(
    version: Callable[[], int], copy: Callable[[], list[float]]
) -> tuple[list[float], int]:
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# An even number before the copy is not enough: the trainer may begin during the copy. What do you
# compare, and when? And what is the use of copying while the number is odd?


# %% tags=["solution"]
def read_whole(
    version: Callable[[], int], copy: Callable[[], list[float]]
) -> tuple[list[float], int]:
    while True:
        before = version()
        if before % 2 == 0:
            weights = copy()
            if version() == before:
                return weights, before


# %% tags=["check"]
class Trainer:
    """Plays a list of versions: goes to the next in each copy, and after a look at an odd one."""

    def __init__(self, versions: list[int]) -> None:
        self.versions, self.copies = versions, 0

    def go_on(self) -> None:
        del self.versions[: len(self.versions) > 1]

    def version(self) -> int:
        now = self.versions[0]
        if now % 2:
            self.go_on()
        return now

    def copy(self) -> list[float]:
        self.copies += 1
        self.go_on()
        return [float(self.copies)]


for story, expected, copies in [
    ([4], ([1.0], 4), 1),  # quiet
    ([4, 5, 6], ([2.0], 6), 2),  # it began during the copy
    ([4, 6], ([2.0], 6), 2),  # a whole update during the copy
    ([7, 7, 7, 8], ([1.0], 8), 1),  # in the middle of an update: do not copy
    ([2, 4, 6, 8], ([4.0], 8), 4),  # unlucky three times
]:
    trainer = Trainer(list(story))
    assert read_whole(trainer.version, trainer.copy) == expected, story
    assert trainer.copies == copies, f"{trainer.copies} copies for {story}"
print("never-torn: correct")

# %% [markdown] tags=["instructor"]
# The third exercise is a *sequence lock*. Do not say the name before the end.
#
# Common first answer: check that the number is even, then copy. Ask what the trainer may do during
# a copy of ten seconds. A second question for the fast ones: why must the trainer write the odd
# number *before* the weights, and what may a GPU or network do to that order? Plan 25 minutes for
# all three.

# %% [markdown]
# ## Quiz

# %% [markdown] tags=["quiz"]
# What is the main gain of the one-sided look-up over `all_to_all`?
#
# - [ ] It sends far fewer bytes.
#   > The table shows nearly the same number.
# - [x] The owners of the rows need not take part.
#   > Right. Nobody waits for a rank that is busy.
# - [ ] It needs no set-up.
#   > The window itself is made by all ranks together.

# %% [markdown] tags=["quiz"]
# A rank puts a tensor into your window. When may you read it?
#
# - [ ] When `put` has returned on the other rank.
#   > You do not know when that is, and an asynchronous put may still be on its way.
# - [x] After `wait_signal`, if the signal was sent after the put.
#   > Right. The signal is the order.
# - [ ] At any time, a put is whole or not there.
#   > The run above read half of each.

# %% [markdown] tags=["quiz"]
# Where is the one-sided `get` in 2.14.1?
#
# - [ ] In `Window`, next to `put`.
#   > The class has none. You read through `map_remote_tensor`.
# - [x] In symmetric memory, for CUDA, NCCL and NVSHMEM.
#   > Right. A CPU has no backend for it.
# - [ ] In Gloo.
#   > Gloo refuses windows and symmetric memory.

# %% [markdown] tags=["quiz"] multi=true
# Two ranks put tokens into one window. What must be settled? Tick all.
#
# - [x] Where each of them writes.
#   > Yes. Overlapping puts lose data without an error.
# - [x] How the owner learns that both are done.
#   > Yes, by a signal from each.
# - [ ] Which of them is first.
#   > With places of their own the order does not matter.
