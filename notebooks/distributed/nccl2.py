# ---
# jupyter:
#   course:
#     title: 'Get ready for nccl2: what changes when "nccl" means nccl2'
#     summary: >-
#       Find out what each NCCL name of 2.14 stands for on your machine, and repair your launch and
#       your code before 2.15 changes the default.
#     minutes: 40
#     level: deeper
#     objectives:
#       - Try a backend in a child process, and read from its exit code how far it really comes.
#       - Say what the names nccl, nccl2, nccl-legacy and nccl-lazy stand for, and switch them.
#       - Predict which GPU a rank takes, and why a late connection hides a wrong choice.
#       - Find in your code what stops working when "nccl" means nccl2.
#     prerequisites: []
#     job: {function: two_groups, ranks: 2}
#     features:
#       nccl2-backend: inspect
#       nccl-legacy-env: runs
#       nccl-lazy: inspect
#       nccl-comm-name: inspect
#       imp-nccl2-surface: inspect
#       imp-nccl-lazy-coverage: inspect
#       imp-nccl-2307: inspect
#     keypoints:
#       - is_backend_available answers whether a name is known, not whether it works.
#       - In 2.14, "nccl" is the old backend. TORCH_DIST_USE_NCCL2=1 puts nccl2 behind it.
#       - The nccl2 of 2.14.1 connects at the first collective, unless you pass device_id.
#       - In 2.15, nccl2 is the default, connects at once, and asks LOCAL_RANK. Pass device_id.
#       - ProcessGroupNCCL2 is not a ProcessGroupNCCL, and lacks some of its methods.
#     sources:
#       - title: PyTorch 2.14 release blog, modern NCCL backend
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#         date: 2026-09-02
#       - title: "PR #188587, the backend nccl2"
#         url: https://github.com/pytorch/pytorch/pull/188587
#         date: 2026-06-30
#       - title: "PR #191272, the name nccl-legacy and TORCH_DIST_USE_NCCL2"
#         url: https://github.com/pytorch/pytorch/pull/191272
#         date: 2026-07-27
#       - title: "PR #189362, nccl-lazy"
#         url: https://github.com/pytorch/pytorch/pull/189362
#         date: 2026-07-09
#       - title: "PR #191528, nonblocking communicators"
#         url: https://github.com/pytorch/pytorch/pull/191528
#         date: 2026-07-29
#       - title: "PR #189361, suspend and resume"
#         url: https://github.com/pytorch/pytorch/pull/189361
#         date: 2026-07-09
#       - title: "PR #189359, reconfigure, without NCCL's own shrink and grow"
#         url: https://github.com/pytorch/pytorch/pull/189359
#         date: 2026-07-09
#       - title: "PR #191982, shrink_group"
#         url: https://github.com/pytorch/pytorch/pull/191982
#         date: 2026-08-03
#       - title: "PR #191001, comm_name"
#         url: https://github.com/pytorch/pytorch/pull/191001
#         date: 2026-07-24
#       - title: "PR #192487, the name of the group as the communicator's name"
#         url: https://github.com/pytorch/pytorch/pull/192487
#         date: 2026-08-07
#       - title: "PR #192895, nccl2 connects at once (after 2.14)"
#         url: https://github.com/pytorch/pytorch/pull/192895
#         date: 2026-08-11
#       - title: "PR #193237, LOCAL_RANK before anything else (after 2.14)"
#         url: https://github.com/pytorch/pytorch/pull/193237
#         date: 2026-08-12
#       - title: "PR #192281, nccl2 as the default (after 2.14)"
#         url: https://github.com/pytorch/pytorch/pull/192281
#         date: 2026-08-06
#       - title: "TorchRec PR #4666, ranks that took the same GPU"
#         url: https://github.com/meta-pytorch/torchrec/pull/4666
#         date: 2026-09-04
#     moved_in_215: >-
#       The default. "nccl" means nccl2 when TORCH_DIST_USE_NCCL2 is unset or 1, and the old backend
#       with 0; the change landed on 1 September 2026. nccl2 connects when the group is made, and
#       takes the device from LOCAL_RANK where you pass none. Read in the pull requests, not run.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import ast
import functools
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from course.kit import (
    GREY,
    PALE_GREEN,
    PALE_RED,
    PAPER,
    expect_error,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()
NCCL_BUILT, GPU = dist.is_nccl_available(), torch.cuda.is_available()

# %% [markdown]
# Your training script says `init_process_group("nccl")`. In 2.14 that is the backend you have known
# for years. In 2.15 the same line starts another one, `nccl2`. You can try it now, and find what
# must change in your launch and in your code.
#
# > [!WARNING]
# > The release marks nccl2 **API Unstable**: it may change without a deprecation period. No GPU was
# > used for this page. What you see are the real classes, options and C++ headers of the package, and
# > what they do on a machine **without** a GPU. The cells marked as hardware run where you have one.
# > Names that begin with an underscore, and `torch._C`, are private.
#
# A **communicator** is what NCCL builds on each GPU to reach the other GPUs of a group. Making one
# takes time and memory, and all ranks must take part.

# %%
if NCCL_BUILT:
    print("this build has NCCL;", "a GPU is there" if GPU else "no GPU is there")
else:
    print("this build has no NCCL (a package for CPU or for macOS): some cells say so and go on")

# %% [markdown]
# ## The problem: "available" is not "works"
#
# `dist.is_backend_available` looks like the question to ask. Ask it, and then try. Each try is a
# child process of its own, since it may die. The child says how far it came. Core dumps are off, and
# there is a time limit.

# %%
CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # if it aborts, leave no core file
import torch
import torch.distributed as dist

name = sys.argv[1]
print("available:", dist.is_backend_available(name), flush=True)
dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
print("init: ok", flush=True)
try:
    dist.all_reduce(torch.ones(2))
    print("all_reduce: ok", flush=True)
except RuntimeError as error:
    print("all_reduce:", str(error).splitlines()[0], flush=True)
dist.destroy_process_group()
print("destroy: ok", flush=True)
"""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


# %%
def try_backend(name: str) -> dict[str, str]:
    """What a child process reached with this backend and a CPU tensor, and how it ended."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, name],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **LOOPBACK},
    )
    steps = dict(line.split(": ", 1) for line in child.stdout.splitlines() if ": " in line)
    code = child.returncode
    steps["end"] = f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name} ({code})"
    errors = [
        line for line in child.stderr.splitlines() if re.match(r"\w+(Error|Exception):", line)
    ]
    cause = [line.split("what():")[1] for line in child.stderr.splitlines() if "what():" in line]
    steps["why"] = " ".join([*errors[-1:], *cause[:1]]).strip()
    return steps


names = ["gloo", "nccl", "nccl2", "cpu:gloo,cuda:nccl2"]
with ThreadPoolExecutor(2) as pool:  # two at a time
    tried = dict(zip(names, pool.map(try_backend, names), strict=True))
for name, steps in tried.items():
    print(f"{name:20} available {steps['available']:5}  ended with {steps['end']}")
    print(f"{'':20} {steps['why'][:78]}" if steps["why"] else f"{'':20} all went well")

# %% [markdown]
# Two kinds of refusal:
#
# - The old backend looks for a GPU when it is made, and raises an error that you can catch.
# - nccl2 says it is available and starts well. Then, while it is taken down, its C++ code asks for the
#   number of GPUs. An error in a C++ destructor ends the process: `SIGABRT`, a negative exit code, and
#   no `except` of yours runs. Even a job that computed all its results on `cpu:gloo` dies like that.
#
# On a build without NCCL, both names raise an error, and nothing aborts. On a machine with a GPU, the
# ends look better. The cell asserts what it can for your machine.

# %%
assert tried["gloo"]["end"] == "exit code 0" and tried["gloo"]["destroy"] == "ok"
if NCCL_BUILT and not GPU:
    assert tried["nccl"]["available"] == tried["nccl2"]["available"] == "True"
    assert "init" not in tried["nccl"] and tried["nccl"]["end"] == "exit code 1"
    for name in ("nccl2", "cpu:gloo,cuda:nccl2"):
        assert tried[name]["init"] == "ok" and "destroy" not in tried[name]
        assert tried[name]["end"] == f"SIGABRT ({-signal.SIGABRT})"
    assert tried["cpu:gloo,cuda:nccl2"]["all_reduce"] == "ok"
    print("nccl2: available, initialized, aborted")
elif not NCCL_BUILT:
    assert all("init" not in tried[name] for name in ("nccl", "nccl2"))
    print("without NCCL in the build, every NCCL name fails at init, with an error")
else:
    print("with a GPU, look at the table: these children used a CPU tensor only")

# %%
STEPS = ["available", "init", "all_reduce", "destroy"]
fig, ax = plt.subplots(figsize=(7, 2.8))
for row, steps in enumerate(tried.values()):
    ended = "died" if "SIG" in steps["end"] else "error"  # at the first step that says nothing
    for column, step in enumerate(STEPS):
        said = steps.get(step, ended)
        if step not in steps:
            ended = "not reached"
        word = {"ok": "yes", "True": "yes", "died": "died", "not reached": said}.get(said, "error")
        colour = {"yes": PALE_GREEN, "not reached": PAPER}.get(word, PALE_RED)
        ax.barh(row, 0.94, left=column, height=0.86, color=colour, edgecolor=GREY)
        ax.text(column + 0.47, row, word, ha="center", va="center")
ax.set_yticks(range(len(tried)), list(tried))
ax.set_xticks([column + 0.47 for column in range(len(STEPS))], STEPS)
ax.set(xlabel="step of the child process", ylabel="backend")
ax.invert_yaxis()
show(
    fig,
    alt="A table of backends against steps. Gloo says yes to all. Without a GPU, nccl is available "
    "and fails at init. nccl2 is available and initializes, and the process dies at destroy.",
)

# %% [markdown]
# > [!TIP]
# > To ask whether a machine can use a backend, let a child process use it, with a tensor on the device
# > you mean, to the end of the process. `try_backend` is such a check for a CPU tensor.

# %% [markdown]
# ## The smallest thing that works: switch the name
#
# There are four names, and an environment variable. Each name stands for a function that makes the
# backend. The private table `Backend._plugins` holds it. A child looks with the variable unset, at 0
# and at 1. It forgets the table in between, for the variable is read when a name is first used.

# %% tags=["claim"] claim="text-nccl2-opt-in"
LOOK = """
import os
from torch.distributed import Backend
for value in ("unset", "0", "1"):
    os.environ.pop("TORCH_DIST_USE_NCCL2", None)
    if value != "unset":
        os.environ["TORCH_DIST_USE_NCCL2"] = value
    Backend._plugins.clear()
    for name in ("nccl", "nccl-legacy", "nccl2", "nccl-lazy"):
        Backend._ensure_backend_registered(name)
        plugin = Backend._plugins.get(name.upper())
        print(value, name, plugin.creator_fn.__name__ if plugin else "unknown")
"""
child = subprocess.run(
    [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=True
)
made_by = {(value, name): made for value, name, made in map(str.split, child.stdout.splitlines())}
for name in ("nccl", "nccl-legacy", "nccl2", "nccl-lazy"):
    print(f"{name:12}", *(f"{v}: {made_by[v, name].strip('_'):32}" for v in ("unset", "1")))
if made_by["unset", "nccl"] != "unknown" and torch.__version__.startswith("2.14"):
    assert made_by["unset", "nccl"] == made_by["0", "nccl"] == made_by["unset", "nccl-legacy"]
    assert made_by["1", "nccl"] == made_by["unset", "nccl2"] != made_by["1", "nccl-legacy"]

# %% [markdown]
# So in 2.14:
#
# - `nccl-legacy` always means the old backend, and `nccl2` always the new one;
# - `nccl` follows `TORCH_DIST_USE_NCCL2`, and only the value `1` counts.
#
# Set the variable in the launcher. In the script it may come too late, or only on some ranks.
#
# In 2.15 the rule turns around: unset or `1` means nccl2, and `0` is the way back. `nccl-legacy` works
# in both, so **a job that must not change can say `nccl-legacy` today**.

# %% [markdown]
# ## Look inside: when does it connect?
#
# The release text calls nccl2 *eager*: it connects at once, not at the first collective. Look at
# what you have. The package ships PyTorch's C++ headers, and the comment above the constructor says
# it. torchcomms is the library from which nccl2 was ported.

# %% tags=["claim"] claim="article-nccl2-port"
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


def header(path: str) -> str:
    """The text of a C++ header of this package, or nothing where it ships none."""
    file = HEADERS / path
    return file.read_text() if file.exists() else ""


nccl2_header = header("nccl2/ProcessGroupNCCL.hpp")
comment = re.search(r"((?: *//.*\n)+)  ProcessGroupNCCL\(\n", nccl2_header)
if comment:
    print(comment[1])
    assert "lazily" in comment[1] and "torchcomms" in comment[1]
else:
    print("this package ships no header with such a comment")

# %% [markdown]
# In 2.14.1 it is **lazy**: it connects at the first collective. It is eager if you pass `device_id`
# to `init_process_group`. Then c10d, the C++ core of `torch.distributed`, connects as soon as the
# group is made. Does it look at `LOCAL_RANK`, as you may have read? Search the library for the word.


# %% tags=["claim"] claim="pr-nccl2-device-id"
def mentions(library: Path, word: bytes) -> bool:
    """Whether the bytes of a library hold this word."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(word) >= 0


library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
if library.exists():
    found = {w: mentions(library, w.encode()) for w in ("TORCH_NCCL_BLOCKING_WAIT", "LOCAL_RANK")}
    print(found)
    if torch.__version__.startswith("2.14"):
        assert found == {"TORCH_NCCL_BLOCKING_WAIT": True, "LOCAL_RANK": False}
else:
    print("this build has no CUDA library to search")

# %% [markdown]
# It does not know the word. Both came later, for 2.15: connecting at once
# ([#192895](https://github.com/pytorch/pytorch/pull/192895)) and `LOCAL_RANK`
# ([#193237](https://github.com/pytorch/pytorch/pull/193237)).
#
# | | 2.14.1, no `device_id` | 2.14.1, with it | 2.15, no `device_id` | 2.15, with it |
# |---|---|---|---|---|
# | `"nccl"` means | the old backend | the old backend | nccl2 | nccl2 |
# | nccl2 connects | at the first collective | in `init_process_group` | when the group is made | when the group is made |
# | its GPU | that of the first tensor | yours | `LOCAL_RANK`, else by rank | yours |
#
# The columns for 2.15 were read in its pull requests, not run.

# %% [markdown]
# ## Break it: two ranks on one GPU
#
# NCCL does not let two ranks of a group share a GPU. So who chooses? Here is the rule of 2.15 as a
# function, and four launches of four ranks on a host. `None` stands for a process without the variable.


# %%
def device_in_215(
    local_rank: str | None, rank: int, device_count: int, device_id: int | None = None
) -> int:
    """The GPU that a rank opens, as the pull requests for 2.15 describe it."""
    if device_id is not None:
        return device_id
    return int(local_rank) if local_rank is not None else rank % device_count


launches = {  # name -> (LOCAL_RANK and RANK of each process, GPUs that each process sees)
    "torchrun": ([("0", 0), ("1", 1), ("2", 2), ("3", 3)], 4),
    "no LOCAL_RANK, every second rank is here": ([(None, 0), (None, 2), (None, 4), (None, 6)], 4),
    "LOCAL_RANK of two pretended nodes": ([("0", 0), ("1", 1), ("0", 2), ("1", 3)], 4),
    "each process sees one GPU": ([("0", 0), ("1", 1), ("2", 2), ("3", 3)], 1),
}
for launch, (processes, count) in launches.items():
    devices = [device_in_215(local, rank, count) for local, rank in processes]
    twice, beyond = len(set(devices)) < len(devices), max(devices) >= count
    verdict = "duplicate" if twice else "no such GPU" if beyond else "fine"
    print(f"{launch:42} GPUs {devices}  {verdict}")

# %% [markdown]
# The third launch is a real one: TorchRec's tests pretend that one host is two nodes
# ([#4666](https://github.com/meta-pytorch/torchrec/pull/4666)). It worked with the old backend, for
# the tensors were on the right GPUs. With nccl2 as default, NCCL reported a duplicate GPU.
#
# *When* you learn of it depends on when the group connects. The next cell is a **stand-in**, not NCCL:
# a small backend in Python whose ranks tell each other their device when they connect, and refuse
# twins. One variant connects in the constructor, one at the first collective.

# %%
from torch._C._distributed_c10d import Backend, _create_work_from_future
from torch.futures import Future


class ToyGpu(Backend):
    """Connects once, and raises where two ranks chose one device. It moves no data."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout=None, eager=False) -> None:
        super().__init__(rank, size)
        self.store, self.connected = store, False
        if eager:
            self.connect()

    def getBackendName(self) -> str:
        return "toygpu"

    def connect(self) -> None:
        device = device_in_215(os.environ.get("LOCAL_RANK"), self.rank(), 4)
        self.store.set(f"device of {self.rank()}", str(device))
        devices = [int(self.store.get(f"device of {rank}")) for rank in range(self.size())]
        if devices.count(device) > 1:
            raise RuntimeError(f"duplicate GPU: the ranks are on {devices}")
        self.connected = True

    def allreduce(self, tensors, options):
        if not self.connected:
            self.connect()
        future = Future()
        future.set_result(tensors)
        return _create_work_from_future(future)


# %%
def toy_job() -> None:
    for eager in (True, False):
        name = "toy-eager" if eager else "toy-lazy"
        create = functools.partial(ToyGpu, eager=eager)
        dist.Backend.register_backend(name, create, devices=["cpu"])
        done, error = [], "none"
        try:
            dist.init_process_group(f"cpu:{name}")
            done.append("group made")
            done.append("checkpoint loaded")  # here a real job spends its minutes
            dist.all_reduce(torch.ones(1))
            done.append("first step")
        except RuntimeError as failure:
            error = str(failure).splitlines()[0]
        report(name, done=done, error=error)
        if dist.is_initialized():
            dist.destroy_process_group()


run = run_ranks(toy_job, 2, env={"LOCAL_RANK": "0"}, quiet=True)
ends = {eager: run.events("toy-eager" if eager else "toy-lazy")[1] for eager in (True, False)}
for eager, end in ends.items():
    print("eager:" if eager else "lazy: ", end["done"], "then", end["error"])
assert ends[True]["done"] == [] and "duplicate GPU" in ends[True]["error"]
assert ends[False]["done"] == ["group made", "checkpoint loaded"]
assert ends[False]["error"] == ends[True]["error"]

# %% [markdown]
# The same mistake, the same message. Eager tells you before anything was loaded. Lazy tells you after
# it, or never, if the tensors happen to be on the right GPUs. That is why a wrong `LOCAL_RANK` can
# live in a launch script for years, and why 2.15 brings it to light.
#
# The remedy is one line, and holds for all versions:
#
# ```python
# local_rank = int(os.environ["LOCAL_RANK"])  # or what your launcher really gives you
# dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
# ```
#
# It fails early where there is no such device. On this machine that check comes before any backend:

# %% tags=["raises"]
store = dist.HashStore()
beyond = torch.device("cuda", torch.cuda.device_count() if GPU else 0)
with expect_error(ValueError, "device_id"):
    dist.init_process_group("nccl2", store=store, rank=0, world_size=1, device_id=beyond)

# %% [markdown]
# ## Look inside: what nccl2 can do, and what it lacks
#
# Which operations do the two new classes implement themselves? Their headers declare it with
# `override`. What nccl-lazy does not override itself stands in its base class, `LazyBackend`.

# %% tags=["claim"] claim="pr-nccl-shrink-not-ported"
METHODS = [
    "suspend", "resume", "getMemoryStats", "split", "shrink", "reconfigure", "new_window",
    "eagerConnectSingleDevice", "getSequenceNumberForGroup", "getError",
]  # fmt: skip
lazy_header = header("nccl2/ProcessGroupNCCLLazy.hpp") + header("lazy/LazyBackend.hpp")


def overrides(text: str, method: str) -> bool:
    return bool(re.search(rf"\b{method}\([^;{{]*\)[^;{{]*\boverride\b", text))


if nccl2_header:
    for method in METHODS:
        marks = ["yes" if overrides(t, method) else "-" for t in (nccl2_header, lazy_header)]
        print(f"{method:28} nccl2 {marks[0]:4} nccl-lazy {marks[1]}")
    refused = re.search(r"supportsReconfigure\(\) const override \{\s*return false", lazy_header)
    print("nccl-lazy refuses to reconfigure:", bool(refused))
    about = re.search(r"reconfigure\(\) tears down.*?fresh ncclComm", nccl2_header, re.DOTALL)
    assert all(overrides(nccl2_header, method) for method in METHODS)
    assert all(
        overrides(lazy_header, m) for m in ("suspend", "resume", "getMemoryStats", "getError")
    )
    assert about and refused
else:
    print("this package ships no headers of nccl2")

# %% [markdown]
# - **suspend, resume, memory statistics.** A suspended communicator gives its GPU memory back, and NCCL
#   keeps a copy on the host. Nothing may use it until `resume()`. In nccl-lazy, all pairs follow.
# - **shrink** is there, for `dist.shrink_group`. But `reconfigure`, shown in the lesson
#   "Rebuild a group in place", does not use it. It tears the old communicator down and makes a new
#   one, so a rebuild costs a full start. nccl-lazy cannot reconfigure.
# - **nccl-lazy** keeps one communicator for collectives and adds one for each pair of ranks that send
#   and receive, at the first message. The old backend behaved like that, and pipeline code may rely on
#   it: traffic with two peers can overlap.
#
# These methods are on the class `Backend` for everyone. A backend without them refuses:

# %% tags=["raises"]
toy = ToyGpu(dist.HashStore(), rank=0, size=1)
with expect_error(RuntimeError, "does not support suspend"):
    toy.suspend()

# %% [markdown]
# Now the other direction. What has the old class that the new one lacks? And what becomes of an
# `isinstance` check?

# %%
LEGACY_ONLY = {
    "NCCLConfig", "NCCL_CTA_POLICY_DEFAULT", "NCCL_CTA_POLICY_EFFICIENCY", "NCCL_CTA_POLICY_ZERO",
    "comm_split_count", "get_build_nccl_version", "get_runtime_nccl_version", "uid",
}  # fmt: skip
if NCCL_BUILT and hasattr(dist, "ProcessGroupNCCL2"):
    old, new = dist.ProcessGroupNCCL, dist.ProcessGroupNCCL2
    only_old = set(vars(old)) - set(dir(new))
    print("public: ", *sorted(name for name in only_old if name[0] != "_"))
    print("private:", *sorted(name for name in only_old if name[0] == "_"))
    print("a ProcessGroupNCCL2 is a ProcessGroupNCCL:", issubclass(new, old))
    assert not issubclass(new, old)
    if torch.__version__.startswith("2.14"):
        assert {name for name in only_old if name[0] != "_"} == LEGACY_ONLY
else:
    print(
        "this build has no NCCL classes; on one with NCCL, only the old class has",
        *sorted(LEGACY_ONLY),
    )

# %% [markdown]
# Code that asks `isinstance(backend, ProcessGroupNCCL)` will quietly take its other branch. Code that
# reads `backend.uid` or counts splits gets an `AttributeError`.

# %% [markdown]
# ## Options: a name in the logs, and calls that do not block
#
# Both backends take the same options object.

# %% tags=["claim"] claim="article-nonblocking-communicators"
if NCCL_BUILT and hasattr(dist, "ProcessGroupNCCL2"):
    assert dist.ProcessGroupNCCL2.Options is dist.ProcessGroupNCCL.Options
    options = dist.ProcessGroupNCCL.Options()
    print("fields of config:", *(name for name in dir(options.config) if name[0] != "_"))
    assert options.config.comm_name is None
    assert options.config.blocking == -(2**31), "NCCL's mark for: not set"
    options.config.comm_name = "tensor_parallel"
    options.config.blocking = 0
    print("set:", options.config.comm_name, options.config.blocking)
    if nccl2_header:
        assert "NCCL_CHECK_NONBLOCKING" in nccl2_header
else:
    print("this build has no NCCL, and no options object of it")

# %% [markdown]
# - `comm_name` appears in NCCL's logs and profilers. If you set none, the old backend passes
#   `description:name` of the group, so name your groups: `dist.new_group(..., group_desc="tp")`.
# - `blocking = 0` asks NCCL to return at once even while it connects. nccl2 then polls the state, under
#   the timeout of the operation. So a peer that never comes costs you a timeout, not a hung thread.
#   It is experimental, and not new: the old backend has it since 2023, and both also switch it on
#   with the variable `TORCH_NCCL_USE_COMM_NONBLOCKING=1`.
#
# You pass them as `pg_options=options` to `init_process_group` or `new_group`.
#
# The NCCL library itself is a package of its own. Which version does your PyTorch ask for?

# %%
wanted = [line for line in metadata.requires("torch") or [] if "nccl" in line]
print(wanted or "this build asks for no NCCL package")
if NCCL_BUILT and not torch.version.hip:
    version = dist.ProcessGroupNCCL.get_build_nccl_version()
    print("built with NCCL", version, "for CUDA", torch.version.cuda)
    if torch.__version__.startswith("2.14") and torch.version.cuda in ("13.0", "13.2"):
        assert version == (2, 30, 7)

# %% [markdown]
# ## Handles: done is not in the order of asking
#
# Whatever the backend, `async_op=True` gives you a handle at once. If each group has its own
# connections, a later call may be done before an earlier one. Gloo shows it: rank 1 joins the second
# call first, and joins the first only when rank 0 has seen the second one done.


# %%
def two_groups() -> None:
    dist.init_process_group("gloo")
    slow, quick = dist.new_group(), dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    asked = torch.ones(1), torch.ones(1)
    if dist.get_rank() == 0:
        first = dist.all_reduce(asked[0], group=slow, async_op=True)
        second = dist.all_reduce(asked[1], group=quick, async_op=True)
        while not second.is_completed():
            time.sleep(0.001)
        report("seen", first=first.is_completed(), second=second.is_completed())
        store.set("second is done", "yes")
        first.wait()
    else:
        dist.all_reduce(asked[1], group=quick)
        store.wait(["second is done"])
        dist.all_reduce(asked[0], group=slow)
    report("sums", values=[tensor.item() for tensor in asked])


run = run_ranks(two_groups, 2, quiet=True)
seen = run.events("seen")[0]
print("first call done:", seen["first"], " second call done:", seen["second"])
assert (seen["first"], seen["second"]) == (False, True)
assert all(event["values"] == [2.0, 2.0] for event in run.events("sums").values())

# %% [markdown]
# Had rank 0 called `first.wait()` first, both ranks would have waited until the timeout. On a GPU,
# `wait()` makes the CUDA stream wait, not the CPU, so there this shows up later, and is harder to see.

# %% [markdown]
# ## On the real hardware
#
# One GPU is enough for this cell. It starts a group of one rank with each NCCL name and `device_id`,
# names the communicator, suspends and resumes it. Run with `NCCL_DEBUG=INFO` to find the name.


# %% tags=["hardware"] hardware="cuda"
def on_gpu(backend: str) -> None:
    options = dist.ProcessGroupNCCL.Options()
    options.config.comm_name = f"lesson_{backend}"
    device = torch.device("cuda", 0)
    dist.init_process_group(backend, device_id=device, pg_options=options)
    tensor = torch.ones(1 << 20, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    nccl = dist.group.WORLD._get_backend(device)
    before = nccl.memory_stats()
    nccl.suspend()
    during = nccl.memory_stats()
    nccl.resume()
    dist.all_reduce(tensor)
    report("gpu", kind=type(nccl).__name__, before=before, during=during, sum=tensor[0].item())
    dist.destroy_process_group()


if NCCL_BUILT and GPU:
    for backend in ("nccl-legacy", "nccl2", "nccl-lazy"):
        print(run_ranks(on_gpu, 1, backend=backend, check=False, quiet=True).events("gpu"))
else:
    print("skipped: needs an NVIDIA GPU; makes a group with each name, suspends and resumes it")

# %% [markdown]
# ## A checklist for the switch
#
# | do | because |
# |---|---|
# | pass `device_id` in every launch | 2.15 connects at once, and else asks `LOCAL_RANK` |
# | run your tests with `TORCH_DIST_USE_NCCL2=1` | finds what depends on the old class |
# | say `nccl-legacy` where nothing may change | the name means the same in 2.14 and 2.15 |
# | keep `TORCH_DIST_USE_NCCL2=0` for 2.15 | the way back for a whole job |
# | replace `isinstance(..., ProcessGroupNCCL)` | ask `dist.get_backend()`, or for what you need |
# | try `nccl-lazy` if your pipeline got slower | one communicator for each pair of ranks |
# | compare times at init again | the cost of connecting moves from the first step to the start |

# %% [markdown] tags=["instructor"]
# Begin with the question "how do you find out whether a machine can use nccl2?", and write the answers
# down. Then run the first table. `is_backend_available` is everyone's first answer.
#
# The release text says eager, the package says lazy. Let the group find the comment in the header
# themselves, and ask which of the two a reader in a year will have. It is a good moment to speak
# about dates: text, package and main branch are three things.
#
# Common wrong answers: "torchrun sets LOCAL_RANK, so we are safe" (look at the fourth launch); "a lazy
# group is safer, since it does not fail" (it fails later). Timing: 10 minutes to the names, 12 for the
# devices, 8 for the surface, 10 for an exercise.

# %% [markdown]
# ## Your turn
#
# ### Exercise: check a host before the launch
#
# Write `check_host(environments, device_count)`. It gets the environment of each process on one host,
# a list of dicts. It returns a list of problems, in the order of the processes, one string each:
#
# - `process 2: LOCAL_RANK is missing`
# - `process 2: no GPU 5`, where the number is not below `device_count`
# - `process 2: GPU 1 is taken by process 0`, by the first process that took it


# %% tags=["exercise"] exercise="check-host" difficulty=1 minutes=8
def check_host(environments: list[dict[str, str]], device_count: int) -> list[str]:
    """Problems of a launch on one host; an empty list where all is well."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# Keep a dict from GPU to the first process that took it. A process with another problem takes none.


# %% tags=["solution"]
def check_host(environments: list[dict[str, str]], device_count: int) -> list[str]:
    """Problems of a launch on one host; an empty list where all is well."""
    problems, taken = [], {}
    for process, environment in enumerate(environments):
        local_rank = environment.get("LOCAL_RANK")
        if local_rank is None:
            problems.append(f"process {process}: LOCAL_RANK is missing")
        elif int(local_rank) >= device_count:
            problems.append(f"process {process}: no GPU {local_rank}")
        elif taken.setdefault(int(local_rank), process) != process:
            first = taken[int(local_rank)]
            problems.append(f"process {process}: GPU {local_rank} is taken by process {first}")
    return problems


# %% tags=["check"]
def with_local_ranks(*local_ranks: str | None) -> list[dict[str, str]]:
    return [{"RANK": "0"} | ({"LOCAL_RANK": x} if x is not None else {}) for x in local_ranks]


assert check_host(with_local_ranks("0", "1", "2"), 4) == []
assert check_host(with_local_ranks("0", None), 2) == ["process 1: LOCAL_RANK is missing"]
assert check_host(with_local_ranks("0", "1", "0", "0"), 4) == [
    "process 2: GPU 0 is taken by process 0",
    "process 3: GPU 0 is taken by process 0",
]
assert check_host(with_local_ranks("5", "5", "1"), 4) == [
    "process 0: no GPU 5",
    "process 1: no GPU 5",
]
print("check-host: correct")

# %% [markdown]
# ### Exercise: handles as they complete
#
# Write `as_completed(works, timeout)`. It gets a dict of names and handles, and yields each name when
# its handle is done, the earliest first. If something is left after `timeout` seconds, it raises
# `TimeoutError`, and the message names what is left. It calls `wait()` on a handle before it yields
# its name, so that an error of the operation is raised and not lost.


# %% tags=["exercise"] exercise="as-completed" difficulty=2 minutes=10
def as_completed(works: dict[str, dist.Work], timeout: float) -> Iterator[str]:
    """Names of the handles, in the order in which they complete."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# Go round: in each round, pick the names whose `is_completed()` is true. Rest a millisecond after a
# round that found none. Compare `time.monotonic()` with the deadline. A copy of the dict may shrink.


# %% tags=["solution"]
def as_completed(works: dict[str, dist.Work], timeout: float) -> Iterator[str]:
    """Names of the handles, in the order in which they complete."""
    left = dict(works)
    deadline = time.monotonic() + timeout
    while left:
        ready = [name for name, work in left.items() if work.is_completed()]
        for name in ready:
            left.pop(name).wait()
            yield name
        if left and not ready:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {timeout} s: {', '.join(left)}")
            time.sleep(0.001)


# %% tags=["check"]
def three_groups() -> None:
    dist.init_process_group("gloo")
    groups = {name: dist.new_group() for name in "abc"}
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        works = {n: dist.all_reduce(torch.ones(1), group=groups[n], async_op=True) for n in groups}
        order = []
        for name in as_completed(works, timeout=20):
            order.append(name)
            store.set(f"{name} is done", "yes")
        report("order", order=order)
    else:
        for name in "cab":
            dist.all_reduce(torch.ones(1), group=groups[name])
            store.wait([f"{name} is done"])


class Pretended:
    """A handle that is done, or not, and whose operation failed."""

    def __init__(self, done: bool) -> None:
        self.is_completed = lambda: done

    def wait(self) -> None:
        raise RuntimeError("the peer is gone")


with expect_error(RuntimeError, "the peer is gone"):
    list(as_completed({"x": Pretended(True)}, timeout=1))
with expect_error(TimeoutError, "late one"):
    list(as_completed({"late one": Pretended(False)}, timeout=0.1))
answer = run_ranks(three_groups, 2, timeout=30, quiet=True).events("order")[0]
assert answer["order"] == ["c", "a", "b"], answer
print("as-completed: correct")

# %% [markdown]
# ### Exercise: find what the switch breaks
#
# Write `before_the_switch(source)`. It reads the text of a Python file, without running it, and
# returns a list of `(line, word)`, sorted:
#
# - `"device_id"` for a call of `init_process_group` without `device_id=` that may start NCCL;
# - `"isinstance"` for an `isinstance` call that names `ProcessGroupNCCL`, alone or in a tuple;
# - `"method"` for an attribute in `LEGACY_ONLY`, other than on a name `ProcessGroupNCCL` itself.
#
# When may a call start NCCL? Think of all the ways to name a backend: first or by keyword, several
# devices in one string, in a variable, or not at all. If you cannot know, report it. A literal
# `nccl-legacy` stays as it is.


# %% tags=["exercise"] exercise="before-the-switch" difficulty=3 minutes=15
def before_the_switch(source: str) -> list[tuple[int, str]]:
    """What to look at before "nccl" means nccl2."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# `ast.walk(ast.parse(source))` gives all nodes. A function is called by a plain name (`ast.Name`, `.id`)
# or by an attribute (`ast.Attribute`, `.attr`); write a helper that gives the last part of both. Only a
# string constant of which you can say that no part after a colon is `nccl`, `nccl2` or `nccl-lazy` is
# harmless.


# %% tags=["solution"]
def last_name(node: ast.AST) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", "")


def may_be_nccl(backend: ast.AST | None) -> bool:
    if not (isinstance(backend, ast.Constant) and isinstance(backend.value, str)):
        return True  # none given, or not known before the program runs
    parts = [part.rpartition(":")[2].strip() for part in backend.value.lower().split(",")]
    return any(part in ("nccl", "nccl2", "nccl-lazy") for part in parts)


def before_the_switch(source: str) -> list[tuple[int, str]]:
    """What to look at before "nccl" means nccl2."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and last_name(node.func) == "init_process_group":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            backend = node.args[0] if node.args else given.get("backend")
            if "device_id" not in given and may_be_nccl(backend):
                found.append((node.lineno, "device_id"))
        elif isinstance(node, ast.Call) and last_name(node.func) == "isinstance":
            kinds = [last_name(part) for part in ast.walk(node.args[1])]
            if "ProcessGroupNCCL" in kinds:
                found.append((node.lineno, "isinstance"))
        elif isinstance(node, ast.Attribute) and node.attr in LEGACY_ONLY:
            if last_name(node.value) != "ProcessGroupNCCL":
                found.append((node.lineno, "method"))
    return sorted(found)


# %% tags=["check"]
SCRIPT = """import torch.distributed as dist
dist.init_process_group("nccl")
dist.init_process_group("gloo")
dist.init_process_group(backend="cpu:gloo,cuda:nccl")
init_process_group(backend)
dist.init_process_group("NCCL", device_id=device)
dist.init_process_group(rank=0, world_size=1)
dist.init_process_group("nccl-legacy")
dist.init_process_group("cpu:gloo,cuda:nccl-legacy")
if isinstance(group, (dist.ProcessGroupGloo, dist.ProcessGroupNCCL)):
    print(group.uid, dist.ProcessGroupNCCL.get_runtime_nccl_version())
elif isinstance(group, ProcessGroupNCCL2):
    print("nccl")
    dist.init_process_group("NCCL")
"""
lines = [(2, "device_id"), (4, "device_id"), (5, "device_id"), (7, "device_id")]
expected = [*lines, (10, "isinstance"), (11, "method"), (14, "device_id")]
assert before_the_switch(SCRIPT) == expected, before_the_switch(SCRIPT)
assert before_the_switch("print('init_process_group(\"nccl\")')") == []
print("before-the-switch: correct")

# %% [markdown]
# ## Check yourself

# %% [markdown] tags=["quiz"]
# `is_backend_available("nccl2")` says True on a machine without a GPU. What does that tell you?
#
# - [ ] That the machine can run nccl2, with CPU tensors.
#   > nccl2 is for CUDA tensors. A CPU tensor has no backend then.
# - [x] That the name is known in this build.
#   > It looks for a registered name. Only a try, in a child process, tells you more.
# - [ ] That it is safe to create a group and destroy it again.
#   > That is what aborts the process, if the build has NCCL.

# %% [markdown] tags=["quiz"]
# Which name means the same backend in 2.14 and in 2.15?
#
# - [ ] `nccl`
#   > In 2.14 the old backend, in 2.15 nccl2, and both change with the variable.
# - [x] `nccl-legacy`
#   > It always makes the old `ProcessGroupNCCL`.
# - [ ] `nccl`, with `TORCH_DIST_USE_NCCL2` unset
#   > Unset means the old backend in 2.14, and nccl2 in 2.15.

# %% [markdown] tags=["quiz"]
# On 2.14.1 you start nccl2 without `device_id`. When do the ranks connect?
#
# - [ ] In `init_process_group`.
#   > It does so if you pass `device_id`, and in 2.15.
# - [x] At the first collective, on the GPU of its tensor.
#   > The header says so, whatever the release text says.
# - [ ] When `LOCAL_RANK` is read.
#   > The library of 2.14.1 does not know that word.

# %% [markdown] tags=["quiz"]
# A job worked for years, and with 2.15 it reports a duplicate GPU. What is the best repair?
#
# - [ ] Set `LOCAL_RANK` to `RANK` in the script.
#   > On the second host the numbers are larger than the number of GPUs.
# - [ ] Use `nccl-lazy`.
#   > Its collectives still need a communicator. Only the pairs are made late.
# - [x] Pass `device_id` with the device that the rank already uses.
#   > The job was right about its tensors. Now it also says so to the backend.
