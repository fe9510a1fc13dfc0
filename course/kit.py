"""What lessons share: start ranks, expect an error, show a figure, draw a timeline of ranks.

Learners read this file too: the notebook generator copies the functions that a lesson uses into
the lesson's setup cell. So every function is small, has no state, and imports what it needs at
the top of this module.
"""

import ast
import contextlib
import inspect
import io
import json
import linecache
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt

# One colour per meaning. The page renderer swaps each for its dark twin, so use no others.
INK, GREY, PAPER = "#1f2430", "#666d7f", "#ffffff"
BLUE, ORANGE, GREEN, RED, PURPLE = "#2563b0", "#c2570c", "#2a7d46", "#c0263a", "#7446b8"
PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_RED = "#cfe0f5", "#f8dcc4", "#cfead7", "#f6cfd4"


def plot_style() -> None:
    """Set matplotlib's defaults so that a figure reads well in light, in dark and in print."""
    plt.rcParams.update(
        {
            "figure.figsize": (7.0, 3.4),
            "figure.facecolor": PAPER,
            "axes.facecolor": PAPER,
            "savefig.facecolor": PAPER,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.titlesize": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE]),
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "grid.color": GREY,
            "grid.alpha": 0.3,
            "font.size": 10,
            "legend.frameon": False,
            "svg.fonttype": "path",
            "svg.hashsalt": "course",
        }
    )


def show(fig: plt.Figure, alt: str) -> None:
    """Show `fig` in a notebook as SVG with `alt` as its text alternative; in a script, close it.

    Raises ValueError where `alt` is empty: a figure without words is lost on some readers.
    """
    if not alt.strip():
        raise ValueError("show(fig, alt=...) needs a sentence that says what the figure shows")
    svg = io.StringIO()
    fig.savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)
    if "IPython" in sys.modules:
        from IPython import display, get_ipython

        if get_ipython():
            data = {"image/svg+xml": svg.getvalue(), "text/plain": alt}
            display.display(data, metadata={"alt": alt}, raw=True)


@contextlib.contextmanager
def expect_error(kind: type[BaseException], match: str = "") -> Iterator[None]:
    """Run a block that must raise `kind` with `match` in its message; print the error and go on.

    Raises AssertionError where the block raises nothing, or the message does not contain `match`.
    """
    try:
        yield
    except kind as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"expected {kind.__name__}, but nothing was raised")
    assert match in message, f"expected {match!r} in {message!r}"
    print(message)


@dataclass
class RankRun:
    """What `run_ranks` saw: one entry per rank in each list."""

    exit_codes: list[int]  # 0 is success, -9 is SIGKILL
    output: list[str]  # what each rank printed
    reports: list[list[dict[str, Any]]]  # what each rank passed to `report`, in order
    seconds: float  # from the first start to the last exit
    killed_at: dict[int, float] = field(default_factory=dict)  # rank -> time.monotonic()

    def events(self, name: str) -> dict[int, dict[str, Any]]:
        """The last report called `name` of every rank that made one: rank -> its values."""
        return {
            rank: values
            for rank, reports in enumerate(self.reports)
            for values in reports
            if values["event"] == name
        }


def report(event: str, **values: Any) -> None:
    """Called in a rank: send `values` (anything JSON can hold) to the parent, with the time.

    Adds `at`, from time.monotonic(), a clock that all processes of one machine share.
    """
    print("\x1e" + json.dumps({"event": event, "at": time.monotonic(), **values}), flush=True)


def source_of(thing: Callable[..., Any] | type) -> str:
    """The source of a function or class, also of one defined in a notebook cell."""
    code = getattr(thing, "__code__", None)
    if code is None:
        methods = (getattr(method, "__wrapped__", method) for method in vars(thing).values())
        code = next(method.__code__ for method in methods if hasattr(method, "__code__"))
    lines = linecache.getlines(code.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == thing.__name__:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= code.co_firstlineno <= node.end_lineno:  # a name may be defined twice
                return "".join(lines[first - 1 : node.end_lineno])
    raise ValueError(f"no source found for {thing.__name__}: define it in a cell or a file")


def looked_up(code: types.CodeType) -> set[str]:
    """Globals and attributes that `code`, and what is defined in it, names; no local variables."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*map(looked_up, inner))


def program_of(function: Callable[..., Any]) -> str:
    """`function` as a program of its own: its source after all that it names.

    Follows the global names that the source uses: imported modules and objects are imported
    again, functions and classes of this notebook are copied, plain constants are written out.
    """
    parts: dict[str, str] = {}

    def follow(thing: Any, name: str, names_of: dict[str, Any]) -> None:
        if name in parts:
            return
        parts[name] = ""
        if isinstance(thing, types.ModuleType):
            parts[name] = f"import {thing.__name__} as {name}\n"
        elif not callable(thing):
            try:
                ast.parse(repr(thing))
            except SyntaxError:
                message = f"a rank cannot get {name} = {thing!r}: make it inside, or pass it as"
                raise ValueError(f"{message} an argument") from None
            parts[name] = f"{name} = {thing!r}\n"
        elif thing.__module__ != names_of["__name__"] or not hasattr(thing, "__name__"):
            parts[name] = f"from {thing.__module__} import {thing.__name__} as {name}\n"
        else:
            source = inspect.cleandoc("\n" + source_of(thing)) + "\n\n"
            names = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
            used = names & looked_up(compile(source, name, "exec"))
            for other in sorted(used & names_of.keys() - {name}):
                if not other.startswith("__"):
                    follow(names_of[other], other, names_of)
            del parts[name]  # to stand after all that it names
            parts[name] = source

    follow(function, function.__name__, function.__globals__)
    return "".join(parts.values())


RANK_MAIN = """
import json, os, sys, threading

def _leave_with_parent():  # the parent holds the other end of stdin: when it dies, so do we
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=_leave_with_parent, daemon=True).start()
{name}(**json.loads(sys.argv[1]))
sys.stdout.flush()
os._exit(0)  # a busy Gloo thread can abort Python's own shutdown
"""


def run_ranks(
    function: Callable[..., None],
    world_size: int,
    *,
    timeout: float = 60.0,
    kill: dict[int, str] | None = None,
    start_after: dict[int, str] | None = None,
    env: dict[str, str] | None = None,
    quiet: bool = False,
    check: bool = True,
    **arguments: Any,
) -> RankRun:
    """Run `function(**arguments)` in `world_size` processes, as torchrun would, on this machine.

    Each rank is a fresh Python with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on set, so
    `dist.init_process_group("gloo")` just works; the store lives in this process, on loopback.
    `kill={2: "step 30"}` sends SIGKILL to rank 2 as soon as rank 2 prints or reports "step 30".
    `start_after={3: "step 30"}` starts rank 3 only when some rank prints or reports "step 30".
    Prints the ranks' output in rank order (unless `quiet`), and leaves no process behind.

    Raises TimeoutError after `timeout` seconds, RuntimeError where a rank that was not killed on
    purpose ends with an exit code other than 0 (unless `check=False`).
    """
    import torch.distributed as dist  # here, so that lessons without ranks start faster

    listener = socket.create_server(("127.0.0.1", 0))  # a plain TCPStore listens on every address
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    kill, waiting = kill or {}, dict(start_after or {})
    output: list[list[str]] = [[] for _ in range(world_size)]
    reports: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
    processes: dict[int, subprocess.Popen[str]] = {}
    killed_at: dict[int, float] = {}
    began = time.monotonic()

    def start(rank: int) -> None:
        variables = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, no rank must host it
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        processes[rank] = subprocess.Popen(
            [sys.executable, str(program), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=variables,
            start_new_session=True,  # so that one signal ends a rank and all that it started
        )
        readers.append(threading.Thread(target=read, args=(rank,), daemon=True))
        readers[-1].start()

    def read(rank: int) -> None:
        for line in processes[rank].stdout:
            if line.startswith("\x1e"):
                reports[rank].append(json.loads(line[1:]))
            else:
                output[rank].append(line)
            if rank in kill and rank not in killed_at and kill[rank] in line:
                killed_at[rank] = time.monotonic()
                os.killpg(processes[rank].pid, signal.SIGKILL)
            for late in [late for late, mark in list(waiting.items()) if mark in line]:
                if waiting.pop(late, None) is not None:
                    start(late)

    readers: list[threading.Thread] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        program = pathlib.Path(folder, f"{function.__name__}.py")
        program.write_text(program_of(function) + RANK_MAIN.format(name=function.__name__))
        try:
            for rank in range(world_size):
                if rank not in waiting:
                    start(rank)
            deadline = began + timeout
            while any(p.poll() is None for p in list(processes.values())):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            late = [rank for rank, p in processes.items() if p.poll() is None]
        finally:
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdin.close()
            for reader in readers:
                reader.join(5)
            for process in processes.values():
                process.stdout.close()
            del store
    run = RankRun(
        exit_codes=[processes[r].returncode if r in processes else 0 for r in range(world_size)],
        output=["".join(lines) for lines in output],
        reports=reports,
        seconds=time.monotonic() - began,
        killed_at=killed_at,
    )
    if not quiet:
        for rank, text in enumerate(run.output):
            print("".join(f"[{rank}] {line}\n" for line in text.splitlines()), end="")
    failed = [r for r, code in enumerate(run.exit_codes) if code and r not in killed_at]
    tails = "".join(f"\n--- rank {r} ---\n{run.output[r][-1500:]}" for r in (late or failed))
    if late:
        raise TimeoutError(f"ranks {late} still ran after {timeout:g} s and were killed{tails}")
    if check and failed:
        codes = {rank: run.exit_codes[rank] for rank in failed}
        raise RuntimeError(f"ranks failed, rank -> exit code: {codes}{tails}")
    return run


def draw_timeline(
    ax: plt.Axes, spans: list[tuple[int, float, float, str]], marks: list[tuple[int, float, str]]
) -> None:
    """Draw what each rank did over time.

    `spans`: (rank, start second, end second, what), one bar each, one colour and hatch per `what`.
    `marks`: (rank, second, label), one cross with a label each.
    """
    kinds = list(dict.fromkeys(what for *_, what in spans))
    looks = [(PALE_BLUE, ""), (PALE_ORANGE, "//"), (PALE_GREEN, ".."), (PALE_RED, "xx")]
    for rank, start, end, what in spans:
        colour, hatch = looks[kinds.index(what) % len(looks)]
        ax.barh(rank, end - start, left=start, height=0.6, color=colour, hatch=hatch, edgecolor=INK)
    for rank, at, label in marks:
        ax.plot(at, rank, marker="X", markersize=10, color=RED, clip_on=False)
        ax.annotate(label, (at, rank), xytext=(6, 12), textcoords="offset points", color=RED)
    for kind, (colour, hatch) in zip(kinds, looks, strict=False):
        ax.fill([], [], facecolor=colour, hatch=hatch, edgecolor=INK, label=kind)
    ranks = sorted({rank for rank, *_ in [*spans, *marks]})
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    ax.invert_yaxis()
    ax.set_xlabel("seconds")
    ax.legend(ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.22))
