"""Run many lessons: what changed only, longest first, on all cores, with progress."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from course.cache import Cache, Executed, cache_key, write_whole
from course.catalog import Catalog
from course.errors import CourseError, Problem
from course.lesson import Lesson
from course.run import run_lesson, shared_caches, terminable
from course.watch import MARK, new_mark, sweep

WARM_UP = "import torch\ntorch.compile(lambda x: x.sin() + 1)(torch.ones(8))"


def run_lessons(
    catalog: Catalog, lessons: list[Lesson], cache: Cache, console: Console, force: bool = False
) -> dict[str, Executed]:
    """The results of `lessons`, by id: from the cache, or by running what is not in it.

    Raises CourseError with the problems of all lessons that failed; those that passed are kept.
    """
    sweep(cache.folder)
    keys = {lesson.id: cache_key(lesson, catalog.root) for lesson in lessons}
    done: dict[str, Executed] = {}
    for lesson in [] if force else lessons:
        kept = cache.load(lesson.id, keys[lesson.id])
        if kept:
            done[lesson.id] = kept
    todo = [lesson for lesson in lessons if lesson.id not in done]
    if not todo:
        console.print(f"lessons: all {len(lessons)} up to date, none run")
        return done
    console.print(f"lessons: {len(done)} up to date, {len(todo)} to run")
    schedule = Schedule(catalog, todo, cache, console).finish()
    if schedule.failed:
        raise CourseError(schedule.problems())
    done |= schedule.done
    return {lesson.id: done[lesson.id] for lesson in lessons}


def warm_up(lessons: list[Lesson], cache: Cache, console: Console) -> None:
    """Fill the shared Inductor cache once, so that no lesson pays for the first compile."""
    variables = shared_caches(cache.folder)
    mark = Path(variables["TORCHINDUCTOR_CACHE_DIR"]) / "warm"
    compiles = any("compile" in c.source for le in lessons for c in le.cells if c.kind == "code")
    if compiles and not mark.exists():
        console.print("warming the compiler's cache, once for this torch version …")
        command = [sys.executable, "-c", WARM_UP]
        environment = {**os.environ, **variables, MARK: new_mark()}
        done = subprocess.run(command, env=environment, check=False, timeout=300)
        if done.returncode == 0:
            write_whole(mark, "")


class Schedule:
    """Runs lessons at the same time, as many as there are cores; an exclusive one alone.

    Afterwards `done` has the results of those that passed, by id, and `failed` the errors.
    """

    def __init__(
        self, catalog: Catalog, todo: list[Lesson], cache: Cache, console: Console
    ) -> None:
        self.catalog, self.todo, self.cache, self.console = catalog, todo, cache, console
        self.slots = max(1, os.cpu_count() or 1)
        known = cache.times()
        self.expected = {le.id: known.get(le.id, le.meta.budget_seconds / 2) for le in todo}
        self.done: dict[str, Executed] = {}
        self.failed: list[CourseError] = []
        self.began = time.monotonic()

    def finish(self) -> "Schedule":
        """Run all of them, and return the schedule itself."""
        with terminable():
            warm_up(self.todo, self.cache, self.console)
            asyncio.run(self._run())
        return self

    def problems(self) -> list[Problem]:
        """What went wrong, in all lessons."""
        return [problem for error in self.failed for problem in error.problems]

    async def _run(self) -> None:
        order = sorted(self.todo, key=lambda lesson: -self.expected[lesson.id])
        slots = asyncio.Semaphore(self.slots)

        async def one(lesson: Lesson) -> None:
            async with slots:
                await self._run_one(lesson)

        async with asyncio.TaskGroup() as group:
            for lesson in order:
                if not lesson.meta.exclusive:
                    group.create_task(one(lesson))
        for lesson in order:
            if lesson.meta.exclusive:
                await self._run_one(lesson)

    async def _run_one(self, lesson: Lesson) -> None:
        self._say(f"[bold]{lesson.id}[/] starts")
        try:
            executed = await run_lesson(lesson, self.catalog.root, self.cache.folder)
        except CourseError as error:
            self.failed.append(error)
            self._say(f"[bold]{lesson.id}[/] [red]failed[/]")
            return
        self.cache.store(executed)
        self.done[lesson.id] = executed
        record = executed.record
        self._say(f"[bold]{lesson.id}[/] passed: {record.seconds:.0f} s, {record.peak_mb} MB")

    def _say(self, text: str) -> None:
        finished = len(self.done) + len(self.failed)
        spent = time.monotonic() - self.began
        ended = {problem.path for problem in self.problems()}
        rest = sum(
            seconds
            for lesson in self.todo
            for seconds in [self.expected[lesson.id]]
            if lesson.id not in self.done and lesson.shown not in ended
        )
        left = max(0.0, rest / self.slots) if finished else rest / self.slots
        self.console.print(
            f"[{finished}/{len(self.todo)}] {spent:4.0f} s, about {left:.0f} s to go: {text}",
            highlight=False,
        )
