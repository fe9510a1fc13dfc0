"""The `course` command: list, run, report, soak, page, site, serve, notebooks, check, new."""

import contextlib
import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from course.cache import RECORDED, Cache, Executed, write_whole
from course.catalog import Catalog, read_catalog
from course.check import stale_notebooks, typed_numbers
from course.errors import CourseError, Problem, did_you_mean
from course.learner import learner_notebook
from course.lesson import Lesson
from course.page import render_page, write_pages
from course.schedule import expected_costs, run_lessons
from course.schedule import shard as shard_of
from course.site import build_site
from course.site import serve as serve_site
from course.soak import busy_neighbour
from course.soak import soak as soak_lessons
from course.summary import summary_pages
from course.tables import table_pages

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True, highlight=False)
Ids = Annotated[list[str] | None, typer.Argument(help="Lessons, unit/slug. None: all of them.")]
Force = Annotated[bool, typer.Option("--force", help="Run also what is up to date.")]


def project_root() -> Path:
    """The folder with mkdocs.yml: here or above. Raises CourseError where there is none."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "mkdocs.yml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise CourseError(Problem(".", 1, "no mkdocs.yml here or above: go to the project's folder"))


def _chosen(catalog: Catalog, ids: list[str] | None) -> list[Lesson]:
    for name in ids or []:
        if name not in catalog.lessons:
            hint = did_you_mean(name, catalog.lessons)
            raise CourseError(Problem("mkdocs.yml", 1, f"no lesson '{name}'{hint}"))
    return [catalog.lessons[name] for name in ids or catalog.lessons]


def _cache(root: Path) -> Cache:
    return Cache(root / ".cache")


def cost_table(catalog: Catalog, cache: Cache) -> Table:
    """One line a lesson: what its last run took, and whether the cache has its result."""
    table = Table("wall s", "CPU s", "peak MB", "run", "result", "lesson")
    costs = cache.costs(catalog.root)
    for lesson in catalog.lessons.values():
        cost, kept = costs.get(lesson.id), cache.latest(lesson, catalog.root)
        figures = [f"{x:.0f}" for x in cost.model_dump().values()] if cost else ["–"] * 3
        date = kept.record.date if kept else "–"
        table.add_row(*figures, date, "kept" if kept else "to run", lesson.id)
    return table


@app.command("list")
def list_() -> None:
    """Show all lessons in order, with minutes, features and the last run's time."""
    catalog = read_catalog(project_root())
    costs = _cache(catalog.root).costs(catalog.root)
    table = Table("lesson", "title", "minutes", "level", "features", "last run")
    for lesson in catalog.lessons.values():
        last = f"{costs[lesson.id].seconds:.0f} s" if lesson.id in costs else "–"
        meta = lesson.meta
        table.add_row(
            lesson.id, meta.title, str(meta.minutes), meta.level, ", ".join(meta.features), last
        )
    console.print(table)


@app.command()
def run(
    ids: Ids = None,
    force: Force = False,
    shard: Annotated[
        str, typer.Option(help="i/n: the i-th of n parts of about the same time.")
    ] = "",
) -> None:
    """Run lessons; those that nothing changed for are taken from the cache."""
    catalog = read_catalog(project_root())
    lessons, cache = _chosen(catalog, ids), _cache(catalog.root)
    if shard:
        parts = re.fullmatch(r"(\d+)/(\d+)", shard)
        number, count = map(int, parts.groups()) if parts else (0, 0)
        if not 1 <= number <= count:
            raise CourseError(Problem("mkdocs.yml", 1, f"--shard {shard}: give i/n, 1 <= i <= n"))
        lessons = shard_of(catalog, lessons, cache, number, count)
    with cache.alone(console.print):
        run_lessons(catalog, lessons, cache, console, force)


@app.command()
def report(
    write: Annotated[bool, typer.Option(help=f"Record the costs in {RECORDED}.")] = False,
) -> None:
    """Show what the last run of each lesson took, and whether it is up to date."""
    catalog = read_catalog(project_root())
    cache = _cache(catalog.root)
    console.print(cost_table(catalog, cache))
    if write:
        costs = expected_costs(catalog, list(catalog.lessons.values()), cache)
        record = {lesson_id: cost.model_dump() for lesson_id, cost in costs.items()}
        write_whole(catalog.root / RECORDED, json.dumps(record, indent=1) + "\n")


@app.command()
def soak(
    ids: Ids = None,
    rounds: Annotated[int, typer.Option("-n", help="How many times.")] = 20,
    load: Annotated[bool, typer.Option(help="Keep one core busy meanwhile.")] = False,
) -> None:
    """Run lessons many times; say how often each passed, and what was left behind."""
    catalog = read_catalog(project_root())
    cache = _cache(catalog.root)
    with cache.alone(console.print), busy_neighbour() if load else contextlib.nullcontext():
        soak_lessons(catalog, _chosen(catalog, ids), cache, console, rounds)


def make_pages(catalog: Catalog, ids: list[str] | None) -> dict[str, Executed]:
    """Run what must run, then write the pages of `ids` (or all pages) in docs/lessons."""
    folder = catalog.root / "docs" / "lessons"
    lessons = _chosen(catalog, ids)
    executed = run_lessons(catalog, lessons, _cache(catalog.root), console)
    files = table_pages(catalog, folder)
    for lesson in lessons:
        files |= render_page(lesson, executed[lesson.id], catalog, folder)
    if not ids:
        files |= summary_pages(catalog, executed)
    write_pages(files, folder, whole=not ids)
    return executed


@app.command()
def page(ids: Ids = None) -> None:
    """Run lessons where needed and write their pages to docs/lessons."""
    catalog = read_catalog(project_root())
    with _cache(catalog.root).alone(console.print):
        make_pages(catalog, ids)
    for lesson in _chosen(catalog, ids):
        console.print(f"docs/lessons/{lesson.id}.md")


@app.command()
def site() -> None:
    """Run what changed, render all pages, build the site; publish nothing where one thing fails."""
    root = project_root()
    with _cache(root).alone(console.print):
        make_pages(read_catalog(root), None)
        build_site(root, root / "site")
    console.print("the site is in site/: look at it with 'make serve'")


@app.command()
def serve(address: str = "127.0.0.1:8000") -> None:
    """Preview the site; save a lesson, and its page follows."""
    root = project_root()
    with _cache(root).alone(console.print):
        make_pages(read_catalog(root), None)
    console.print(f"look at http://{address}/ ; Ctrl-C ends")

    def changed(files: list[Path]) -> None:
        console.print("changed: " + ", ".join(path.name for path in files))
        try:
            with _cache(root).alone(console.print):
                make_pages(read_catalog(root), None)
        except CourseError as error:
            _show(error)

    serve_site(root, address, changed)


@app.command()
def notebooks() -> None:
    """Write the learner's notebook of every lesson."""
    catalog = read_catalog(project_root())
    for lesson in catalog.lessons.values():
        path = lesson.path.with_suffix(".ipynb")
        write_whole(path, learner_notebook(lesson, catalog))
        console.print(path.relative_to(catalog.root).as_posix())


@app.command()
def check() -> None:
    """Check all that can be checked without running a lesson."""
    catalog = read_catalog(project_root())
    problems = list(stale_notebooks(catalog))
    cache = _cache(catalog.root)
    for lesson in catalog.lessons.values():
        executed = cache.latest(lesson, catalog.root)
        if executed:
            problems += typed_numbers(lesson, executed)
    if problems:
        raise CourseError(problems)
    console.print(f"{len(catalog.lessons)} lessons, {len(catalog.features)} features: no problem")


@app.command()
def new(lesson_id: Annotated[str, typer.Argument(help="unit/slug")]) -> None:
    """Write a lesson file to fill in, and say which line mkdocs.yml needs."""
    root = project_root()
    path = root / "notebooks" / f"{lesson_id}.py"
    if path.exists() or lesson_id.count("/") != 1:
        raise CourseError(Problem(f"notebooks/{lesson_id}.py", 1, "give a new name, unit/slug"))
    template = (Path(__file__).parent / "template.py.txt").read_text(encoding="utf-8")
    write_whole(path, template)
    console.print(f"fill in notebooks/{lesson_id}.py, and add to nav in mkdocs.yml, in its unit:")
    console.print(f"      - lessons/{lesson_id}.md")


def _show(error: CourseError) -> None:
    for problem in error.problems:
        errors.print(str(problem), markup=False, style="red")


def main() -> None:
    """Entry point: problems are printed one a line, and the exit code is 1."""
    try:
        app()
    except CourseError as error:
        _show(error)
        raise SystemExit(1) from None
    except OSError as error:  # a full disk, a folder that cannot be written
        place = error.filename or "."
        message = f"{error.strerror or error}: make room or give write access, then build again"
        _show(CourseError(Problem(str(place), 1, message)))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
