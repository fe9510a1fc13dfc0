# ---
# jupyter:
#   course:
#     title: Write a communication backend in Python
#     summary: Write, install and test your own backend, and put one around Gloo that counts bytes.
#     minutes: 45
#     level: deeper
#     objectives:
#       - Write a c10d backend as a Python class, and run a collective on it in one process.
#       - Install it by an entry point, so that a training script names it and imports nothing.
#       - Run DDP, DTensor and torch.compile on it without a change to them.
#       - Wrap Gloo in a backend of your own that records every call and its bytes.
#       - Explain why a batch of sends and receives may deadlock, and order it so that it cannot.
#     prerequisites: []
#     job: {function: count_a_step, ranks: 2}
#     features:
#       pluggable-dist-backends: runs
#       imp-custom-backends: runs
#     keypoints:
#       - A backend is an object with one method per collective. A method that is missing gives a
#         clear error, not a crash.
#       - An entry point in the group torch.distributed.backends makes the name known. The script
#         that trains imports nothing.
#       - DDP, DTensor and torch.compile ask for collectives, not for a library. They run unchanged.
#       - A backend that wraps another sees every call and its bytes, and moves none itself.
#       - In a batch of sends and receives, all sends come first. Otherwise everybody waits.
#     sources:
#       - title: PyTorch 2.14 release blog, pluggable distributed backends
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#       - title: "PR #186853, one of those behind backends by entry point"
#         url: https://github.com/pytorch/pytorch/pull/186853
#       - title: "PR #187388, one of those behind backends in Python"
#         url: https://github.com/pytorch/pytorch/pull/187388
#       - title: Python packaging guide, entry points
#         url: https://packaging.python.org/en/latest/specifications/entry-points/
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. The base class is private in 2.14.1, so run this
#       notebook on your version before you ship a backend. Its asserts tell you what moved.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from course.kit import (
    BLUE,
    GREY,
    ORANGE,
    expect_error,
    plot_style,
    program_of,
    report,
    run_ranks,
    show,
)

plot_style()

# %% [markdown]
# A **backend** moves the bytes when ranks call a collective such as `all_reduce`. You know Gloo
# (CPU) and NCCL (NVIDIA GPUs). A vendor of another network or chip writes its own. So may you: to
# count traffic, to inject faults, to compress, or to understand what DDP asks for.
#
# Until 2.13 your training script had to import the backend's package before it could name it.
# PyTorch 2.14 finds an installed backend by its name, and documents that it may be plain Python.
#
# > [!WARNING]
# > The release marks this **API Unstable**: it may change without a deprecation period. The base
# > class comes from a private module, `torch._C._distributed_c10d`. Keep it in one file of yours.

# %% [markdown]
# ## The problem: nobody knows your name
#
# A script that names a backend which nobody registered stops at once. `HashStore` is a **store**, a
# small key-value server through which ranks find each other; this one lives in one process.

# %% tags=["raises"]
with expect_error(AssertionError, "Unknown c10d backend type"):
    dist.init_process_group("cpu:mailbox", store=dist.HashStore(), rank=0, world_size=1)

# %% [markdown]
# At the end of the next part, that name works, in a script that imports nothing of yours.

# %% [markdown]
# ## The smallest thing that works
#
# Here is a backend with one collective. It is called *mailbox*: every byte goes through the store,
# like a letter through a mailbox. Each rank puts its tensor there and reads those of all others.
#
# Three things make it a backend. It derives from `Backend` in the private module (not from
# `dist.Backend`, which is a list of names). It says its name. And its method `allreduce` takes a
# list of tensors and options, and returns a `Work`, the handle on which a caller waits.


# %%
from torch._C._distributed_c10d import Backend, _create_work_from_future
from torch.futures import Future


def done(tensors: list[torch.Tensor]):
    """A Work that is finished already: our methods block until they are through."""
    future = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


class SmallMailbox(Backend):
    """A backend with one collective."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.step = store, 0
        store.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "mailbox"

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        self.step += 1
        self.store.set(f"{self.step}/{self.rank()}", tensor.numpy().tobytes())
        letters = [self.store.get(f"{self.step}/{rank}") for rank in range(self.size())]
        parts = [torch.frombuffer(bytearray(x), dtype=tensor.dtype) for x in letters]
        tensor.copy_(torch.stack(parts).sum(0).view_as(tensor))
        return done(tensors)


# %% [markdown]
# A backend is an ordinary object. So you can test it in one process, with a thread for each rank and
# a `HashStore` between them. No process group, no launch, and it takes milliseconds.


# %%
def in_threads(size: int, rank_program: Callable, backend: type, seconds: float = 5.0) -> list:
    """What `rank_program(backend object)` returns in each of `size` threads, by rank."""
    store = dist.HashStore()
    patience = timedelta(seconds=seconds)

    def one(rank: int):
        return rank_program(backend(store, rank, size, patience))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def sum_of_ranks(backend) -> float:
    tensor = torch.full((4,), float(backend.rank() + 1))
    backend.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor[0].item()


sums = in_threads(3, sum_of_ranks, SmallMailbox)
print("1 + 2 + 3 on each rank:", sums)
assert sums == [6.0, 6.0, 6.0]

# %% [markdown]
# What you do not write is refused with a clear message. Nothing falls back to another backend.

# %% tags=["raises"]
alone = SmallMailbox(dist.HashStore(), 0, 1, timedelta(seconds=5))
with expect_error(RuntimeError, "does not support broadcast"):
    alone.broadcast([torch.ones(1)], dist.BroadcastOptions())

# %% [markdown]
# ## The whole backend
#
# DDP, DTensor and friends need more than a sum. Build on two ideas. `exchange` gives everybody the
# tensors of all ranks, and most collectives are one line after it. `calls` and the two byte counts
# record what was asked.


# %%
class Traffic(Backend):
    """Sends and fetches tensors through the store; counts calls and bytes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.step, self.batch = store, 0, None
        self.calls: Counter[str] = Counter()
        self.letters: Counter[tuple] = Counter()
        self.bytes_sent = self.bytes_read = 0
        store.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "mailbox"

    def put(self, key: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().numpy().tobytes()
        self.bytes_sent += len(data)
        self.store.set(key, data)

    def fetch(self, key: str, like: torch.Tensor) -> torch.Tensor:
        data = bytearray(self.store.get(key))  # waits until the key is there
        self.bytes_read += len(data)
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape)

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order."""
        self.step += 1
        self.put(f"{self.step}/{self.rank()}", tensor)
        others = [r for r in range(self.size()) if r != self.rank()]
        found = {r: self.fetch(f"{self.step}/{r}", tensor) for r in others}
        return [found.get(r, tensor.clone()) for r in range(self.size())]


# %% [markdown]
# The collectives. The names are those of 2.14: `all_gather_single` was `_allgather_base` once. A
# method does not know who calls it. DDP, DTensor and your own script look the same from here.


# %%
class Collectives(Traffic):
    """The collectives that DDP, DTensor and functional collectives use."""

    def allreduce(self, tensors, options):
        self.calls["allreduce"] += 1
        stack = torch.stack(self.exchange(tensors[0]))
        if options.reduceOp == dist.ReduceOp.SUM:
            result = stack.sum(0)
        elif options.reduceOp == dist.ReduceOp.AVG:
            result = stack.mean(0)
        elif options.reduceOp == dist.ReduceOp.MAX:
            result = stack.amax(0)
        else:
            raise RuntimeError(f"mailbox cannot reduce with {options.reduceOp}")
        tensors[0].copy_(result)
        return done(tensors)

    def broadcast(self, tensors, options):
        self.calls["broadcast"] += 1
        tensors[0].copy_(self.exchange(tensors[0])[options.rootRank])
        return done(tensors)

    def allgather(self, outputs, inputs, options):
        self.calls["allgather"] += 1
        for output, part in zip(outputs[0], self.exchange(inputs[0]), strict=True):
            output.copy_(part)
        return done(outputs[0])

    def all_gather_single(self, output, input, options):
        self.calls["all_gather_single"] += 1
        output.copy_(torch.cat(self.exchange(input)).view_as(output))
        return done([output])

    def all_gather_single_coalesced(self, outputs, inputs, options):  # what DTensor calls
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, options)
        return done(outputs)

    def reduce_scatter_single(self, output, input, options):
        self.calls["reduce_scatter_single"] += 1
        total = torch.stack(self.exchange(input)).sum(0)
        output.copy_(total.chunk(self.size())[self.rank()].view_as(output))
        return done([output])

    def scatter(self, outputs, inputs, options):
        self.calls["scatter"] += 1
        mine = inputs[0] if inputs else [torch.zeros_like(outputs[0])] * self.size()
        outputs[0].copy_(self.exchange(torch.stack(list(mine)))[options.rootRank][self.rank()])
        return done(outputs)

    def barrier(self, options):
        self.calls["barrier"] += 1
        self.exchange(torch.zeros(1))
        return done([])


# %% [markdown]
# And the point-to-point calls. A caller may open a **batch** (`start_coalescing`), issue sends and
# receives, and close it (`end_coalescing`). In a batch we only take notes, and act at the end.


# %%
class Mailbox(Collectives):
    """The collectives, and sends and receives."""

    supports_coalescing = True

    def key(self, source: int, target: int, tag: int) -> str:
        """A key for the next letter of this pair; both ends count alike."""
        self.letters[source, target, tag] += 1
        return f"{source}>{target}/{tag}/{self.letters[source, target, tag]}"

    def send(self, tensors, target, tag):
        self.calls["send"] += 1
        key = self.key(self.rank(), target, tag)
        return self.act_or_note("send", lambda: self.put(key, tensors[0]), tensors)

    def recv(self, tensors, source, tag):
        self.calls["recv"] += 1
        key = self.key(source, self.rank(), tag)
        return self.act_or_note(
            "recv", lambda: tensors[0].copy_(self.fetch(key, tensors[0])), tensors
        )

    def act_or_note(self, kind: str, action: Callable, tensors):
        if self.batch is None:
            action()
        else:
            self.batch.append((kind, action))
        return done(tensors)

    def start_coalescing(self) -> None:
        self.batch = []

    def end_coalescing(self):
        notes, self.batch = self.batch, None
        for _, action in notes:
            action()
        return done([])


# %% [markdown]
# The class has a bug, planted for later. First, install it.

# %% [markdown]
# ## Install it by an entry point
#
# An **entry point** is a line in a package's metadata that maps a name to a function. PyTorch 2.14
# reads the group `torch.distributed.backends`. In your `pyproject.toml` it looks like this:
#
# ```toml
# [project.entry-points."torch.distributed.backends"]
# mailbox = "mailbox_backend:register"
# ```
#
# `pip install` turns it into a small folder next to your module. This cell writes module and folder
# by hand, so that you see there is no magic.


# %%
def register() -> None:
    """What the entry point names: tells torch how to make the backend, and for which devices."""
    dist.Backend.register_backend("mailbox", Mailbox, devices=["cpu"])


def install(folder: Path) -> None:
    """Write the package that `pip install` would write."""
    (folder / "mailbox_backend.py").write_text(program_of(register))
    metadata = folder / "mailbox_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mailbox_backend\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[torch.distributed.backends]\nmailbox = mailbox_backend:register\n"
    )


# %% [markdown]
# Now a training script. It names `mailbox` and knows nothing else about it. The helper `run_ranks`
# starts it as real processes. Each of them has the folder on its path, as after `pip install`.


# %%
def sum_in_script() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mailbox")
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
    report("sum", value=tensor[0].item(), backend=type(backend).__name__, calls=backend.calls)
    dist.destroy_process_group()


def run_installed(script: Callable[[], None], ranks: int):
    """Run `script` in processes that have the mailbox package installed."""
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        return run_ranks(script, ranks, timeout=90, env={"PYTHONPATH": path}, quiet=True)


run = run_installed(sum_in_script, 2)
for rank, event in run.events("sum").items():
    print(f"rank {rank}: sum {event['value']}, by {event['backend']}, calls {event['calls']}")
    assert event["value"] == 3.0 and event["backend"] == "Mailbox"

# %% [markdown]
# `dist.get_backend_impl`, new in 2.14, gives you the backend object behind a group: your own object,
# with its counters.

# %% [markdown]
# ## Look inside: what do DDP, DTensor and the compiler ask for?
#
# They ask for collectives, so they run on yours. Run all three in one script, and read the counters
# after each. Every rank feeds DDP another batch, and the gradient must be the mean over the ranks.


# %% tags=["claim"] claim="text-python-backend"
def everything() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mailbox")
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))

    def note(what: str, value: float) -> None:
        report(what, value=value, calls=dict(backend.calls), sent=backend.bytes_sent)
        backend.calls.clear()
        backend.bytes_sent = 0

    model = DistributedDataParallel(nn.Linear(4, 2))
    note("DDP, wrap", 0.0)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    note("DDP, one step", model.module.weight.grad[0, 0].item())
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    note("DTensor, shard", sharded.to_local().numel())
    note("DTensor, gather", sharded.full_tensor().sum().item())
    torch._inductor.config.cpp_cache_precompile_headers = False  # for so little they take longer
    compiled = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1)
    note("torch.compile", compiled(torch.full((4,), rank + 1.0))[0].item())
    dist.destroy_process_group()


run = run_installed(everything, 2)
for event in run.reports[0]:
    print(
        f"{event['event']:16} value {event['value']:4.1f}  {event['sent']:3} bytes  {event['calls']}"
    )
values = {event["event"]: event["value"] for event in run.reports[0]}
assert values["DDP, one step"] == 1.5, "the mean of 1 and 2"
assert values["DTensor, gather"] == 15.0 and values["torch.compile"] == 7.0

# %% [markdown]
# Read the table. Wrapping a model in DDP gathers the shapes of its parameters, to check that all
# ranks agree, and broadcasts the weights of rank 0. A step is one `allreduce` per **bucket**, and this
# model has one: 10 numbers, 40 bytes. DTensor scatters to shard and gathers to get whole again.
#
# `torch.compile` sees nothing of your Python. The collective is one operator of its graph, and the
# operator ends in your method.

# %% [markdown]
# ## Look inside: how many bytes does each rank read?
#
# Our `exchange` is wasteful: everybody reads everything. Count the bytes that rank 0 reads to sum a
# tensor of 1000 numbers, for 2 to 8 ranks. Next to it stands what a **ring** needs, the method
# that Gloo and NCCL use for large tensors: $2\,(n-1)/n$ times the size of the tensor.

# %%
SIZE = 4000  # bytes


def bytes_read(backend) -> int:
    backend.allreduce([torch.ones(SIZE // 4)], dist.AllreduceOptions())
    return backend.bytes_read


worlds = range(2, 9)
measured = [in_threads(world, bytes_read, Mailbox)[0] for world in worlds]
ring = [2 * (world - 1) / world * SIZE for world in worlds]
fig, ax = plt.subplots()
ax.plot(worlds, [x / 1000 for x in measured], color=ORANGE, marker="o", label="mailbox, counted")
ax.plot(worlds, [x / 1000 for x in ring], color=BLUE, marker="s", ls="--", label="ring, by formula")
ax.axhline(SIZE / 1000, color=GREY, lw=1)
ax.text(8, SIZE / 1000 * 0.72, "the tensor itself", color=GREY, ha="right", va="top", fontsize=9)
ax.set(xlabel="ranks", ylabel="kB that one rank reads", xticks=list(worlds), ylim=(0, None))
ax.legend()
show(
    fig,
    alt="kB that one rank reads to sum a tensor of 4 kB, against the number of ranks. The mailbox "
    "line climbs from 4 to 28. The ring line stays between 4 and 7.",
)
assert measured == [(world - 1) * SIZE for world in worlds]

# %% [markdown]
# The mailbox grows with the number of ranks, the ring hardly does. Your last exercise closes the
# gap.

# %% [markdown]
# ## Break it: everybody waits for a letter
#
# Now the planted bug. In a ring, each rank sends to the next and receives from the one before. Here
# the *receive* is listed first in the batch. `dist.batch_isend_irecv` promises that this works. Our
# `end_coalescing` acts in the order of the notes.


# %%
def ring_step(backend) -> str:
    """Pass this rank's number to the next rank, the receive listed first."""
    rank, size = backend.rank(), backend.size()
    incoming, outgoing = torch.zeros(1), torch.full((1,), float(rank))
    backend.start_coalescing()
    backend.recv([incoming], (rank - 1) % size, 0)
    backend.send([outgoing], (rank + 1) % size, 0)
    try:
        backend.end_coalescing()
    except dist.DistStoreError as error:
        return f"rank {rank}: {type(error).__name__}: {error}"
    return f"rank {rank} got {incoming.item():.0f}"


for line in in_threads(3, ring_step, Mailbox, seconds=0.5):
    print(line)

# %% [markdown]
# Each rank waits for a letter, and nobody has sent one. In a real job, that is a hang until the
# timeout. The cure is one line: in a batch, do all sends before any receive. A send into a mailbox
# never waits for anybody, so every letter is there when the receives begin.


# %%
class OrderedMailbox(Mailbox):
    """Acts on a batch in an order that cannot deadlock."""

    def end_coalescing(self):
        sends_first = sorted(self.batch, key=lambda note: note[0] == "recv")
        self.batch = sends_first
        return super().end_coalescing()


lines = in_threads(3, ring_step, OrderedMailbox)
print("\n".join(lines))
assert lines == ["rank 0 got 2", "rank 1 got 0", "rank 2 got 1"]

# %% [markdown]
# `sorted` keeps the order within the sends and within the receives, and it must: letters of one pair
# are told apart by counting them.

# %% [markdown]
# ## A backend around Gloo
#
# You seldom want to move the bytes yourself. More often you want to *see* them, under the backend
# that you use. So make a backend that holds a Gloo backend, notes the call and passes it on. This is
# 20 lines, and you may take them with you.


# %%
class CountingGloo(Backend):
    """Gloo, with a count of calls and of bytes by collective."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def getBackendName(self) -> str:
        return "counting"

    def noted(self, name: str, tensors: list[torch.Tensor], *arguments):
        self.calls[name] += 1
        self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return getattr(self.gloo, name)(*arguments)

    def allreduce(self, tensors, options):
        return self.noted("allreduce", tensors, tensors, options)

    def broadcast(self, tensors, options):
        return self.noted("broadcast", tensors, tensors, options)

    def allgather(self, outputs, inputs, options):
        return self.noted("allgather", inputs, outputs, inputs, options)

    def barrier(self, options):
        return self.noted("barrier", [], options)


# %% [markdown]
# Use it on a model with 6 layers, and ask how DDP packs its gradients. `bucket_cap_mb` is the size of
# a bucket in MB. Registering in the script, as before 2.14, still works and is handy in a notebook.


# %%
def count_a_step() -> None:
    torch.set_num_threads(1)
    dist.Backend.register_backend("counting", CountingGloo, devices=["cpu"])
    dist.init_process_group("counting")
    backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
    for bucket in (0.1, 25.0):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        parallel = DistributedDataParallel(model, bucket_cap_mb=bucket)
        for _ in range(3):  # DDP settles its buckets in the second step
            backend.calls.clear()
            backend.bytes.clear()
            parallel(torch.ones(2, 256)).sum().backward()
        report("step", bucket=bucket, calls=backend.calls, bytes=backend.bytes)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    report("gradients", bytes=gradients)
    dist.destroy_process_group()


run = run_ranks(count_a_step, 2, quiet=True)
*steps, gradients = run.reports[0]
for step in steps:
    print(
        f"bucket_cap_mb={step['bucket']:4}: {step['calls']}, {step['bytes']['allreduce']:,} bytes"
    )
    assert step["bytes"]["allreduce"] == gradients["bytes"]
print(f"the gradients have {gradients['bytes']:,} bytes")
assert steps[0]["calls"]["allreduce"] > steps[1]["calls"]["allreduce"]

# %% [markdown]
# The bytes are those of the gradients, whatever the buckets: DDP sends nothing else. Small buckets
# make more calls, which can start earlier in the backward pass.
#
# What DDP calls, a wrapper must have. If you leave out `broadcast` here, DDP stops with the message
# that you saw above.

# %% [markdown]
# ## Measure it
#
# How much slower is Python and a store than Gloo? Time the same sum of 1 MB on three groups of one
# script. They take turns, so that whatever else the machine does meets all three alike, and both ranks
# begin together: else the first would also pay for the wait of the last. `new_group` takes a backend
# by name.


# %%
def race() -> None:
    torch.set_num_threads(1)
    dist.Backend.register_backend("mailbox", OrderedMailbox, devices=["cpu"])
    dist.Backend.register_backend("counting", CountingGloo, devices=["cpu"])
    dist.init_process_group("gloo")
    tensor = torch.ones(1 << 18)
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "counting", "mailbox")}
    for _ in range(30):
        seconds = {}
        for name, group in groups.items():
            dist.barrier()  # both ranks begin together
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds[name] = time.perf_counter() - began
        report("round", **seconds)
    dist.destroy_process_group()


rounds = run_ranks(race, 2, quiet=True).reports[0]
best = {name: min(entry[name] for entry in rounds) for name in ("gloo", "counting", "mailbox")}
middle = {name: median(entry[name] / entry["gloo"] for entry in rounds) for name in best}
print("          best of 30   times Gloo, median of 30 rounds")
for name, seconds in best.items():
    print(f"{name:9}{seconds * 1e3:8.2f} ms {middle[name]:12.1f}")
assert best["mailbox"] > 1.5 * best["gloo"]
assert middle["counting"] < middle["mailbox"]

# %% [markdown]
# The wrapper adds a call into Python and two additions to a call that moves 1 MB: too little for this
# clock. Its ratio wavers about 1. The mailbox is for tests and for learning.

# %% [markdown]
# ## On the real hardware
#
# The backend gets the tensors as they are. On a GPU you would register it with `devices=["cuda"]`, and
# your methods must respect CUDA streams: the tensor may not be computed yet when you are called. This
# cell wraps NCCL in the same way. It was not run for this page.


# %% tags=["hardware"] hardware="cuda"
class CountingNccl(Backend):
    """NCCL, with a count of all_reduce calls."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.nccl = dist.ProcessGroupNCCL(store, rank, size)
        self.calls = Counter()

    def getBackendName(self) -> str:
        return "counting_nccl"

    def allreduce(self, tensors, options):
        self.calls["allreduce"] += 1
        return self.nccl.allreduce(tensors, options)


def one_sum_on_a_gpu() -> None:
    torch.cuda.set_device(0)
    dist.Backend.register_backend("counting_nccl", CountingNccl, devices=["cuda"])
    dist.init_process_group("counting_nccl")
    dist.all_reduce(torch.ones(4, device="cuda"))
    print(dist.get_backend_impl(dist.group.WORLD, torch.device("cuda")).calls)
    os._exit(0)


if torch.cuda.is_available():
    run_ranks(one_sum_on_a_gpu, 1)
else:
    print("skipped: needs an NVIDIA GPU; wraps NCCL and counts its calls")

# %% [markdown] tags=["instructor"]
# Before the table of calls, ask: "What does DDP send when you wrap a model, before any step?" Few
# guess that it compares shapes first.
#
# At the deadlock, let them draw three boxes with an arrow for each letter. Then ask why sorting is
# enough, and what would happen if a *send* had to wait as well (a rendezvous send, as with large
# messages of MPI): then sorting is not enough, and somebody must go first.
#
# Timing: class and entry point 15 minutes, table and figure 10, deadlock 8, wrapper 12.

# %% [markdown]
# ## Your turn
#
# ### Exercise: the operation that is missing
#
# Somebody trains with a loss that needs the *smallest* value over all ranks, and meets
# `mailbox cannot reduce with …`. Write `MinMailbox`, which can do `dist.ReduceOp.MIN` as well, and
# leaves all else to `OrderedMailbox`. It must count its call like the others.


# %% tags=["exercise"] exercise="missing-operation" difficulty=1 minutes=6
class MinMailbox(OrderedMailbox):
    """Can also take the minimum."""

    def allreduce(self, tensors, options):
        ...  # your turn
        return super().allreduce(tensors, options)


# %% [markdown] tags=["hint"]
# Look at the operation first. If it is MIN, do what the others do: count, exchange, reduce, copy into
# the caller's tensor, return a finished Work.


# %% tags=["solution"]
class MinMailbox(OrderedMailbox):
    """Can also take the minimum."""

    def allreduce(self, tensors, options):
        if options.reduceOp != dist.ReduceOp.MIN:
            return super().allreduce(tensors, options)
        self.calls["allreduce"] += 1
        tensors[0].copy_(torch.stack(self.exchange(tensors[0])).amin(0))
        return done(tensors)


# %% tags=["check"]
def smallest_and_sum(backend) -> tuple[list[float], float, int]:
    low, total = torch.tensor([3.0 - backend.rank(), backend.rank() + 5.0]), torch.ones(1)
    options = dist.AllreduceOptions()
    backend.allreduce([total], options).wait()
    options.reduceOp = dist.ReduceOp.MIN
    backend.allreduce([low], options).wait()
    return low.tolist(), total.item(), backend.calls["allreduce"]


assert in_threads(3, smallest_and_sum, MinMailbox) == [([1.0, 5.0], 3.0, 2)] * 3
print("missing-operation: correct")

# %% [markdown]
# ### Exercise: a broadcast that sends once
#
# `broadcast` above is wasteful: all ranks send their tensors, and all but one are thrown away. Write
# `ThriftyMailbox` with a `broadcast` in which only the root sends, and only the others read. Mind that
# `exchange` also numbers the letters: all ranks must stay in step for the next collective.


# %% tags=["exercise"] exercise="thrifty-broadcast" difficulty=2 minutes=10
class ThriftyMailbox(OrderedMailbox):
    """A broadcast that sends no more than it must."""

    def broadcast(self, tensors, options):
        return super().broadcast(tensors, options)  # replace this


# %% [markdown] tags=["hint"]
# Use `put` and `fetch`, with a key that contains `self.step`, and raise the step on every rank.


# %% tags=["solution"]
class ThriftyMailbox(OrderedMailbox):
    """A broadcast that sends no more than it must."""

    def broadcast(self, tensors, options):
        self.calls["broadcast"] += 1
        self.step += 1  # on every rank, also on those that only read
        key = f"{self.step}/root"
        if self.rank() == options.rootRank:
            self.put(key, tensors[0])
        else:
            tensors[0].copy_(self.fetch(key, tensors[0]))
        return done(tensors)


# %% tags=["check"]
def two_broadcasts_and_a_sum(backend) -> tuple:
    options = dist.BroadcastOptions()
    values = []
    for root in (2, 0):
        options.rootRank = root
        tensor = torch.full((100,), float(backend.rank() + root))
        backend.broadcast([tensor], options).wait()
        values.append(tensor[7].item())
    traffic = backend.bytes_sent, backend.bytes_read
    return values, traffic, sum_of_ranks(backend)


results = in_threads(4, two_broadcasts_and_a_sum, ThriftyMailbox)
assert [values for values, _, _ in results] == [[4.0, 0.0]] * 4
wanted = [(400, 400), (0, 800), (400, 400), (0, 800)]  # (bytes sent, bytes read) by rank
assert [traffic for _, traffic, _ in results] == wanted
assert [total for _, _, total in results] == [10.0] * 4, "the ranks must stay in step"
print("thrifty-broadcast: correct")

# %% [markdown]
# ### Exercise: close the gap
#
# The figure shows that each rank of the mailbox reads $n-1$ tensors to sum one. Bring that down to
# the ring's $2\,(n-1)/n$, with `exchange`'s means: `put`, `fetch` and keys. No ring is needed. Cut the
# tensor into $n$ chunks and let every rank be responsible for one. The size is divisible by $n$, and
# only `SUM` is asked for.


# %% tags=["exercise"] exercise="close-the-gap" difficulty=3 minutes=20
class FairMailbox(OrderedMailbox):
    """Sums with as few bytes as a ring."""

    def allreduce(self, tensors, options):
        return super().allreduce(tensors, options)  # replace this


# %% [markdown] tags=["hint"]
# Two phases. First, rank r fetches chunk r from everybody and sums: that is a reduce-scatter. Then r
# puts its summed chunk, and everybody fetches the n - 1 sums of the others: an all-gather. Each phase
# reads (n - 1) chunks, and a chunk is 1/n of the tensor.


# %% tags=["solution"]
class FairMailbox(OrderedMailbox):
    """Sums with as few bytes as a ring."""

    def allreduce(self, tensors, options):
        self.calls["allreduce"] += 1
        self.step += 1
        me, size = self.rank(), self.size()
        others = [rank for rank in range(size) if rank != me]
        chunks = list(tensors[0].flatten().clone().chunk(size))
        for rank in others:  # phase 1: each chunk goes to the rank that is responsible for it
            self.put(f"{self.step}/{me}>{rank}", chunks[rank])
        for rank in others:
            chunks[me] += self.fetch(f"{self.step}/{rank}>{me}", chunks[me])
        self.put(f"{self.step}/sum{me}", chunks[me])  # phase 2: everybody collects the sums
        for rank in others:
            chunks[rank] = self.fetch(f"{self.step}/sum{rank}", chunks[rank])
        tensors[0].copy_(torch.cat(chunks).view_as(tensors[0]))
        return done(tensors)


# %% tags=["check"]
def fair_sum(backend) -> tuple:
    matrix = torch.arange(240.0).view(24, 10) * (backend.rank() + 1)
    backend.allreduce([matrix], dist.AllreduceOptions()).wait()
    return matrix, backend.bytes_read


for world in (2, 3, 4, 6):
    factor = sum(range(1, world + 1))
    for matrix, read in in_threads(world, fair_sum, FairMailbox):
        assert torch.equal(matrix, torch.arange(240.0).view(24, 10) * factor)
        assert read == 2 * (world - 1) * 960 // world, "a ring reads less"
print("close-the-gap: correct")

# %% [markdown]
# ## Check yourself

# %% [markdown] tags=["quiz"]
# Your backend has no `reduce_scatter_single`. What happens when FSDP asks for it?
#
# - [ ] PyTorch uses Gloo for that call.
#   > Nothing falls back. A group has the backend that you gave it for a device.
# - [x] A `RuntimeError` says that your backend does not support it.
#   > The base class raises it, with the name that `getBackendName` gives.
# - [ ] The process crashes.
#   > You called a missing method above: a clear Python error.

# %% [markdown] tags=["quiz"]
# What must a training script do to use an installed backend that has an entry point?
#
# - [ ] Import the package before `init_process_group`.
#   > That was so before 2.14, and still works.
# - [x] Name it: `init_process_group("mailbox")`.
#   > The entry point is looked up when a name is unknown, and its function registers the backend.
# - [ ] Set an environment variable with the path of the module.
#   > The metadata of the installed package is enough.

# %% [markdown] tags=["quiz"]
# In a batch, the receives come first, and a receive blocks until the letter is there. Three ranks in
# a ring do this. What follows?
#
# - [ ] Ranks 0 and 1 finish, rank 2 waits.
#   > All do the same thing, so nobody is ahead.
# - [x] All wait until the timeout.
#   > Nobody has sent when everybody waits. Do the sends first.
# - [ ] It works, since `batch_isend_irecv` sorts them.
#   > It hands the batch to the backend. The order is your job.

# %% [markdown] tags=["quiz"]
# You wrap Gloo and see one `allreduce` of 40 bytes for a step of DDP. Which change makes more calls?
#
# - [ ] A larger batch.
#   > Gradients have the size of the parameters, whatever the batch.
# - [x] A smaller `bucket_cap_mb`, on a model that is large enough.
#   > Each bucket is one call. The bytes stay the same.
# - [ ] More ranks.
#   > Each rank makes the same calls, however many ranks there are.
