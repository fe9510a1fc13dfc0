"""Run many lessons: what changed only, longest first, on all cores, with progress."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console

from course.cache import Cache, Cost, Executed, cache_key, write_whole
from course.catalog import Catalog
from course.errors import CourseError, Problem
from course.lesson import Lesson
from course.run import run_lesson, shared_caches, terminable
from course.watch import MARK, new_mark, sweep

UNKNOWN_MB = 3000  # what a lesson that never ran may take: the most that one is allowed
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
    console.print(schedule.summary(), highlight=False)
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


def usable_memory_mb() -> int:
    """Nine tenths of the memory of this machine, or of the container around this process."""
    limits = [psutil.virtual_memory().total]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max": no limit
    return int(min(limits) * 0.9) >> 20


def expected_costs(
    catalog: Catalog, lessons: list[Lesson], cache: Cache, own: bool = True
) -> dict[str, Cost]:
    """What each lesson is expected to cost: as last time, or half its budget where it never ran."""
    known = cache.costs(catalog.root, own)
    return {
        lesson.id: known.get(lesson.id)
        or Cost(
            seconds=lesson.meta.budget_seconds / 2,
            cpu_seconds=lesson.meta.budget_seconds / 2,
            peak_mb=UNKNOWN_MB,
        )
        for lesson in lessons
    }


def shard(
    catalog: Catalog, lessons: list[Lesson], cache: Cache, number: int, count: int
) -> list[Lesson]:
    """Part `number` (from 1) of `count`: the longest first, each to the part with the least yet.

    It goes by the recorded costs, so that all machines cut alike. No part takes more than 4/3
    of what the best cut could reach (Graham 1969).
    """
    costs = expected_costs(catalog, lessons, cache, own=False)
    filled = [0.0] * count
    mine = []
    for lesson in sorted(lessons, key=lambda lesson: (-costs[lesson.id].seconds, lesson.id)):
        least = filled.index(min(filled))
        filled[least] += costs[lesson.id].seconds
        if least == number - 1:
            mine.append(lesson)
    return mine


class Schedule:
    """Runs lessons at the same time, as cores and memory allow; an exclusive one alone.

    Afterwards `done` has the results of those that passed, by id, and `failed` the errors.
    """

    def __init__(
        self, catalog: Catalog, todo: list[Lesson], cache: Cache, console: Console
    ) -> None:
        self.catalog, self.todo, self.cache, self.console = catalog, todo, cache, console
        self.slots = max(1, os.cpu_count() or 1)
        self.memory_mb = usable_memory_mb()
        self.expected = expected_costs(catalog, todo, cache)
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

    def summary(self) -> str:
        """The time of all runs, and the least that they could take on this machine's cores."""
        records = [executed.record for executed in self.done.values()]
        longest = max((record.seconds for record in records), default=0.0)
        least = max(longest, sum(record.cpu_seconds for record in records) / self.slots)
        spent = time.monotonic() - self.began
        return (
            f"ran {len(records)} lessons in {spent:.0f} s; at best {least:.0f} s, "
            f"for {self.slots} cores and a longest lesson of {longest:.0f} s"
        )

    async def _run(self) -> None:
        order = sorted(self.todo, key=lambda lesson: -self.expected[lesson.id].seconds)
        waiting = [lesson for lesson in order if not lesson.meta.exclusive]
        running: dict[asyncio.Task, Lesson] = {}
        while waiting or running:
            while lesson := self._next(waiting, list(running.values())):
                waiting.remove(lesson)
                running[asyncio.create_task(self._run_one(lesson))] = lesson
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                del running[task]
                task.result()
        for lesson in order:
            if lesson.meta.exclusive:
                await self._run_one(lesson)

    def _next(self, waiting: list[Lesson], running: list[Lesson]) -> Lesson | None:
        """The longest that waits and has a core and the memory it took last time; None: wait."""
        if not running:
            return waiting[0] if waiting else None
        if len(running) >= self.slots:
            return None
        free = self.memory_mb - sum(self.expected[lesson.id].peak_mb for lesson in running)
        return next((le for le in waiting if self.expected[le.id].peak_mb <= free), None)

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
            self.expected[lesson.id].seconds
            for lesson in self.todo
            if lesson.id not in self.done and lesson.shown not in ended
        )
        left = max(0.0, rest / self.slots) if finished else rest / self.slots
        self.console.print(
            f"[{finished}/{len(self.todo)}] {spent:4.0f} s, about {left:.0f} s to go: {text}",
            highlight=False,
        )
