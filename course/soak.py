"""Run lessons many times: do they always pass, and what do they leave?"""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from course.cache import Cache, Record
from course.catalog import Catalog
from course.errors import CourseError, Problem
from course.lesson import Lesson
from course.schedule import Schedule
from course.watch import leftovers

BUSY = "while True: pass"


def soak(
    catalog: Catalog, lessons: list[Lesson], cache: Cache, console: Console, rounds: int
) -> None:
    """Run `lessons` `rounds` times and print, per lesson, passes, seconds and memory.

    Raises CourseError with all that failed, and with processes, shared-memory files and scratch
    folders that were left.
    """
    before = leftovers()
    records: dict[str, list[Record]] = {lesson.id: [] for lesson in lessons}
    problems: list[Problem] = []
    for number in range(1, rounds + 1):
        console.print(f"[bold]round {number} of {rounds}[/]")
        schedule = Schedule(catalog, lessons, cache, console).finish()
        for lesson_id, executed in schedule.done.items():
            records[lesson_id].append(executed.record)
        for problem in schedule.problems():
            problems.append(problem)
            console.print(str(problem), markup=False, style="red")
        for left in sorted(leftovers() - before):
            problems.append(Problem("notebooks", 1, f"round {number} left {left}"))
    console.print(_table(records, rounds))
    if problems:
        raise CourseError(problems)


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _table(records: dict[str, list[Record]], rounds: int) -> Table:
    table = Table("lesson", "passed", "seconds: least", "median", "most", "most MB")
    for lesson_id, runs in records.items():
        seconds = sorted(run.seconds for run in runs) or [0.0]
        figures = (seconds[0], statistics.median(seconds), seconds[-1])
        memory = max((run.peak_mb for run in runs), default=0)
        row = [f"{value:.0f}" for value in (*figures, memory)]
        table.add_row(lesson_id, f"{len(runs)} of {rounds}", *row)
    return table
