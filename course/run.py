"""Run one lesson in a fresh kernel, watched from outside, and collect its outputs."""

import asyncio
import contextlib
import datetime
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nbformat
import psutil
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from course.cache import Executed, Record, cache_key, torch_version
from course.errors import CourseError, Problem
from course.job import asks_for_program
from course.lesson import Cell, Exercise, Lesson
from course.watch import (
    MARK,
    Watch,
    mapped_shared_memory,
    new_mark,
    new_scratch,
    shared_memory_files,
)

MEMORY_LIMIT = 3 << 30  # bytes, contract 3: the lesson and all its children
OUTPUT_LIMIT = 1 << 20  # bytes of output of one lesson
SLACK = 3  # a lesson may take this many budgets before it is ended: builds share the cores
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Step:
    """One execution of a cell. `starter`: a check that must fail, for the solution is not there."""

    cell: Cell
    kind: Literal["cell", "starter", "check"]
    exercise: Exercise | None = None


def steps_of(lesson: Lesson) -> Iterator[Step]:
    """The code cells in order; each check runs twice: after the starter, after the solution."""
    checks = {e.check.index: e for e in lesson.exercises.values()}
    for cell in lesson.cells:
        if cell.kind == "code":
            yield Step(cell, "check" if cell.index in checks else "cell", checks.get(cell.index))
            if cell.index in lesson.exercises:
                exercise = lesson.exercises[cell.index]
                yield Step(exercise.check, "starter", exercise)


class _Client(NotebookClient):
    """A client that stops listening to a lesson that never stops talking."""

    received = 0
    on_flood: Any = None

    def process_message(self, msg: dict, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("stream", "display_data", "execute_result", "error"):
            self.received += len(str(msg["content"]))
            if self.received > OUTPUT_LIMIT:
                self.on_flood()
                return None
        return super().process_message(msg, cell, cell_index)


@contextlib.asynccontextmanager
async def _kernel(
    client: _Client, environment: dict[str, str], folder: Path
) -> AsyncIterator[None]:
    """A running kernel, which is ended and waited for.

    nbclient's own way would take SIGINT and SIGTERM for itself, and a build could not be stopped.
    """
    await client.async_start_new_kernel(env=environment, cwd=str(folder))
    try:
        await client.async_start_new_kernel_client()
        yield
    finally:
        if client.kc:
            client.kc.stop_channels()
        await client.km.shutdown_kernel(now=True)


def share_of_a_core() -> float:
    """The part of a core that a process gets now: less than 1 where more want to run than can.

    A lesson's limit counts seconds times this, so that a busy machine does not end a good lesson.
    """
    return min(1.0, (os.cpu_count() or 1) / max(os.getloadavg()[0], 0.01))


class Run:
    """One run of one lesson: a scratch folder, a kernel, a watch, and what went wrong."""

    def __init__(self, lesson: Lesson, root: Path, cache_folder: Path) -> None:
        self.lesson, self.root, self.cache_folder = lesson, root, cache_folder
        self.scratch = new_scratch()
        for name in ("work", "tmp", "ipython"):
            (self.scratch / name).mkdir()
        self.mark = new_mark()
        self.cause = ""  # why the run was ended from outside
        self.step: Step | None = None
        self.outputs: dict[int, list[dict[str, Any]]] = {}
        self.starter_errors: dict[int, str] = {}
        self.cell_seconds: dict[int, float] = {}
        self.program = ""
        self.watch: Watch | None = None

    def environment(self) -> dict[str, str]:
        """The environment of the kernel: everything it writes goes to the scratch folder."""
        sandbox = Path(__file__).parent / "sandbox"
        return {
            **os.environ,
            MARK: self.mark,
            "COURSE_NETWORK_LOG": str(self.scratch / "network.log"),
            "PYTHONPATH": os.pathsep.join([str(sandbox), str(Path(__file__).parents[1])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "TMPDIR": str(self.scratch / "tmp"),
            "IPYTHONDIR": str(self.scratch / "ipython"),
            **shared_caches(self.cache_folder),
        }

    async def execute(self) -> Executed:
        """Run all steps. Raises CourseError with file, line, cause and what to do."""
        notebook = nbformat.v4.new_notebook()
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc")
        manager.connection_file = str(self.scratch / "k.json")
        client = _Client(notebook, km=manager, allow_errors=True, timeout=None)
        before = shared_memory_files()
        began = time.monotonic()
        try:
            async with _kernel(client, self.environment(), self.scratch / "work"):
                self.watch = Watch(self.mark, manager.provisioner.pid)
                client.on_flood = lambda: self.stop(
                    f"printed more than {OUTPUT_LIMIT >> 20} MB: print less"
                )
                guard = asyncio.create_task(self._guard(began))
                try:
                    await self._run_steps(client, notebook)
                    seconds = time.monotonic() - began
                    self.watch.sample()
                    left = self.watch.left_running()
                finally:
                    guard.cancel()
                    self.watch.end()  # faster than asking, and reaches what the kernel started
        except (DeadKernelError, RuntimeError) as error:
            cell = self.step.cell if self.step else self.lesson.cells[0]
            cause = self.cause or f"the kernel died in this cell ({_last_line(str(error))})"
            raise CourseError(self.lesson.problem(cell, cause)) from None
        finally:
            if self.watch:
                self.watch.end()
            left_files = self._left_files(before)
            network = self._network_use()
            shutil.rmtree(self.scratch, ignore_errors=True)
        problems = [self._whole(message) for message in [*left, *left_files, *network]]
        if problems:
            raise CourseError(problems)
        return self._executed(seconds)

    async def _run_steps(self, client: _Client, notebook: Any) -> None:
        for number, step in enumerate(steps_of(self.lesson)):
            self.step = step
            cell = nbformat.v4.new_code_cell(self.step.cell.source)
            notebook.cells.append(cell)
            began = time.monotonic()
            await client.async_execute_cell(cell, number, store_history=False)
            if self.cause:
                raise DeadKernelError(self.cause)
            self._judge(self.step, cell.outputs, time.monotonic() - began)
        if self.lesson.meta.job:
            cell = nbformat.v4.new_code_cell(asks_for_program(self.lesson.meta.job))
            notebook.cells.append(cell)
            await client.async_execute_cell(cell, len(notebook.cells) - 1, store_history=False)
            error = next((o for o in cell.outputs if o.output_type == "error"), None)
            if error:
                raise CourseError(self._whole(f"metadata field 'job': {_short(error.evalue)}"))
            self.program = "".join(output.text for output in cell.outputs)

    def _judge(self, step: Step, outputs: list[Any], seconds: float) -> None:
        """Keep the outputs of a step that did what it should; raise CourseError otherwise."""
        error = next((o for o in outputs if o.output_type == "error"), None)
        text = f"{error.ename}: {error.evalue}" if error else ""
        name = step.exercise.name if step.exercise else ""
        if step.kind == "starter":
            if not error:
                message = f"exercise '{name}': the starter passes its check: check more"
                raise CourseError(self.lesson.problem(step.exercise.starter, message))
            self.starter_errors[step.cell.index] = text
            return
        if error:
            what = f"exercise '{name}': the solution fails its check" if name else "the cell raises"
            if "raises" in step.cell.tags:
                what = "the 'raises' cell does not raise what it says"
            message = f"{what}: {_short(text)}"
            raise CourseError(self.lesson.problem(step.cell, message, _error_line(error) - 1))
        if "setup" in step.cell.tags and outputs:
            message = f"a 'setup' cell shows nothing, but this one shows {_shown(outputs[0])}"
            raise CourseError(self.lesson.problem(step.cell, message))
        if "hardware" in step.cell.tags and not outputs:
            message = "a 'hardware' cell prints its result, or 'skipped: …' and why"
            raise CourseError(self.lesson.problem(step.cell, message))
        self.outputs[step.cell.index] = [_plain(output) for output in outputs]
        self.cell_seconds[step.cell.index] = round(seconds, 3)

    def stop(self, cause: str) -> None:
        """End the run from outside: every process of it, at once."""
        if not self.cause:
            self.cause = cause
            self.watch.end()

    async def _guard(self, began: float) -> None:
        """End the run when it takes too long or too much memory."""
        limit = self.lesson.meta.budget_seconds * SLACK
        spent, last = 0.0, began
        while True:
            await asyncio.to_thread(self.watch.sample)
            now = time.monotonic()
            spent, last = spent + (now - last) * share_of_a_core(), now
            if spent > limit:
                self.stop(
                    f"still running after {limit} s, {SLACK} times its budget: is there an "
                    "endless loop? Shrink the cell, or raise budget_seconds with a reason"
                )
            elif self.watch.peak_bytes > MEMORY_LIMIT:
                self.stop(f"used more than {MEMORY_LIMIT >> 30} GB of memory: shrink the cell")
            await asyncio.sleep(0.2)

    def _left_files(self, before: set[str]) -> Iterator[str]:
        found = []
        for path in sorted((self.scratch / "tmp").iterdir()):
            found.append(f"temp file left behind: {path.name}: use tempfile.TemporaryDirectory")
        new = shared_memory_files() - before
        for name in sorted(new - mapped_shared_memory() if new else ()):
            found.append(f"shared-memory file left behind: /dev/shm/{name}")
        return found

    def _network_use(self) -> list[str]:
        log = self.scratch / "network.log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [f"network use: {line}: lessons run offline" for line in dict.fromkeys(lines)]

    def _whole(self, message: str) -> Problem:
        """A problem of the whole lesson, at its last code cell."""
        return self.lesson.problem([c for c in self.lesson.cells if c.kind == "code"][-1], message)

    def _executed(self, seconds: float) -> Executed:
        record = Record(
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            seconds=round(seconds, 1),
            cpu_seconds=round(self.watch.cpu_seconds, 1),
            peak_mb=self.watch.peak_bytes >> 20,
            python=platform.python_version(),
            torch=torch_version(),
            machine=f"{os.cpu_count()} CPU cores, {psutil.virtual_memory().total >> 30} GB, "
            f"{platform.system()} {platform.machine()}",
        )
        key = cache_key(self.lesson, self.root)
        return Executed(
            lesson_id=self.lesson.id,
            key=key,
            outputs=self.outputs,
            starter_errors=self.starter_errors,
            cell_seconds=self.cell_seconds,
            program=self.program,
            record=record,
        )


def shared_caches(cache_folder: Path) -> dict[str, str]:
    """Variables that let all lessons share compiled code and font caches."""
    names = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "MPLCONFIGDIR": "matplotlib",
    }
    folder = cache_folder / f"torch-{torch_version()}"
    return {variable: str(folder / name) for variable, name in names.items()}


async def run_lesson(lesson: Lesson, root: Path, cache_folder: Path) -> Executed:
    """Run `lesson` in a fresh kernel and return what it showed.

    Raises CourseError where a cell raises, an exercise or a limit fails, or something is left
    behind. Whatever happens, no process of the run is alive afterwards.
    """
    run = Run(lesson, root, cache_folder)
    try:
        return await run.execute()
    finally:
        if run.watch:
            run.watch.end()
        shutil.rmtree(run.scratch, ignore_errors=True)


def _plain(output: Any) -> dict[str, Any]:
    """An output as plain data, without terminal colours and without what differs by run."""
    data = {k: v for k, v in dict(output).items() if k not in ("execution_count", "transient")}
    if data["output_type"] == "stream":
        data["text"] = ANSI.sub("", data["text"])
    return data


def _shown(output: Any) -> str:
    """The text of an output, short."""
    return repr(_short(output.get("text") or output.get("data", {}).get("text/plain", "")))


def _error_line(error: Any) -> int:
    """The line of the cell at which its error was raised, 1 where unknown."""
    trace = ANSI.sub("", "\n".join(error.traceback))
    match = re.search(r"Cell In\[[^\]]*\], line (\d+)", trace)
    return int(match[1]) if match else 1


def _short(text: str) -> str:
    line = ANSI.sub("", text).strip().replace("\n", " ")
    return line if len(line) <= 300 else line[:297] + "…"


def _last_line(text: str) -> str:
    lines = [line for line in ANSI.sub("", text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the build as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    old = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
