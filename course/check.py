"""Checks beyond reading: generated notebooks up to date, no measured number typed into prose."""

import re
from collections.abc import Iterator

from course.cache import Executed
from course.catalog import Catalog
from course.errors import Problem
from course.learner import learner_notebook
from course.lesson import Lesson
from course.markdown import CODE, LINK, MATH

NUMBER = re.compile(r"(?<![\w.#/-])\d+(?:[.,]\d+)*(?![\w-])")
RELEASE = re.compile(r"2\.1\d(\.\d+)?|20\d\d|3\.1\d")  # versions of torch and Python, years


def stale_notebooks(catalog: Catalog) -> Iterator[Problem]:
    """Notebooks that differ from what their lesson gives, that are missing, or have no lesson."""
    folder = catalog.root / "notebooks"
    for lesson in catalog.lessons.values():
        path = lesson.path.with_suffix(".ipynb")
        shown = path.relative_to(catalog.root).as_posix()
        wanted = learner_notebook(lesson, catalog).splitlines()
        if not path.exists():
            yield Problem(shown, 1, "missing: run 'make notebooks' and commit the file")
            continue
        found = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if found != wanted:
            pairs = zip(found + [""], wanted + [""], strict=False)
            line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), len(wanted) + 1)
            message = (
                f"differs from what {lesson.shown} gives: it is generated, so edit the .py "
                "and run 'make notebooks'"
            )
            yield Problem(shown, line, message)
    for path in sorted(folder.glob("*/*.ipynb")):
        if path.relative_to(folder).with_suffix("").as_posix() not in catalog.lessons:
            shown = path.relative_to(catalog.root).as_posix()
            yield Problem(shown, 1, "no lesson makes this notebook: delete it")


def typed_numbers(lesson: Lesson, executed: Executed) -> Iterator[Problem]:
    """Numbers in prose that repeat an output, and so go stale; not those that stand in code."""
    outputs = " ".join(
        str(output.get("text") or output.get("data", {}).get("text/plain", ""))
        for outputs in executed.outputs.values()
        for output in outputs
    )
    measured = set(NUMBER.findall(outputs))
    code = " ".join(cell.source for cell in lesson.cells if cell.kind == "code")
    given = set(re.findall(r"\d+(?:\.\d+)?", code))
    for cell in (cell for cell in lesson.cells if cell.kind == "markdown"):
        prose = cell.source
        for pattern in (CODE, MATH, LINK):
            prose = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), prose)
        for match in NUMBER.finditer(prose):
            number = match[0]
            long = len(number) > 2 or "." in number
            if long and number in measured - given and not RELEASE.fullmatch(number):
                line = prose[: match.start()].count("\n")
                message = (
                    f"the number {number} repeats an output: let a cell print it, not the prose"
                )
                yield lesson.problem(cell, message, line)
