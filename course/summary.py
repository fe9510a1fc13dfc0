"""Pages that sum lessons up: templates, filled with what the lessons say and have measured.

A template is a Markdown file with Jinja marks under docs/data/pages; its page has the same path
under docs. A number on such a page comes from a table that a lesson's cell printed, never typed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import jinja2

from course.cache import Executed, Record
from course.catalog import Catalog
from course.errors import CourseError, Problem, did_you_mean
from course.lesson import Cell, Lesson

TEMPLATES = "docs/data/pages"
GAP = re.compile(r" {2,}")


class NotThere(LookupError):
    """A template asks for something that no lesson has."""


def printed_table(text: str) -> dict[str, dict[str, str]]:
    """A table as a cell prints it: a head line, then rows, columns two spaces or more apart.

    Returns the rows by their first column; each row is column -> text. Raises NotThere where a
    row has not as many columns as the head.
    """
    head, *rows = [GAP.split(line.strip()) for line in text.strip().splitlines()] or [[]]
    for row in rows:
        if len(row) != len(head):
            raise NotThere(f"prints a row {row} under the columns {head}")
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


class Facts:
    """What a template may ask for. Every method raises NotThere with what to write instead."""

    def __init__(self, catalog: Catalog, executed: dict[str, Executed]) -> None:
        self.catalog, self.executed = catalog, executed

    def lesson(self, lesson_id: str) -> Lesson:
        """The lesson, for its title and minutes."""
        return _pick(self.catalog.lessons, lesson_id, "lesson")

    def measured(self, lesson_id: str, table: str, row: str, column: str) -> str:
        """One entry of the table that the cell marked `table="…"` printed in the last run."""
        lesson = self.lesson(lesson_id)
        cell = _pick(_tables(lesson), table, f"table in {lesson_id}")
        outputs = self.executed[lesson_id].outputs.get(cell.index, [])
        text = "".join(o["text"] for o in outputs if o["output_type"] == "stream")
        try:
            rows = printed_table(text)
        except NotThere as wrong:
            raise NotThere(f"the cell of table '{table}' in {lesson_id} {wrong}") from None
        return _pick(_pick(rows, row, f"row in {table}"), column, f"column in {table}")

    def row(self, lesson_id: str, when: str) -> str:
        """One line of a unit's table: the lesson, its minutes, when to take it."""
        meta = self.lesson(lesson_id).meta
        return f"| [{meta.title}](../lessons/{lesson_id}.md) | {meta.minutes} | {when} |"

    def runs(self) -> list[tuple[Lesson, Record]]:
        """Every lesson with the record of its last run, in the order of the course."""
        return [(x, self.executed[name].record) for name, x in self.catalog.lessons.items()]

    def minutes(self, unit: str) -> int:
        """The minutes of all lessons of a unit, given as the first part of their ids."""
        lessons = [x for name, x in self.catalog.lessons.items() if name.startswith(f"{unit}/")]
        if not lessons:
            raise NotThere(f"no lesson in unit '{unit}'")
        return sum(lesson.meta.minutes for lesson in lessons)


def _pick(known: dict, name: str, kind: str):
    if name not in known:
        raise NotThere(f"no {kind} called '{name}'{did_you_mean(name, known)}")
    return known[name]


def _tables(lesson: Lesson) -> dict[str, Cell]:
    return {str(c.values["table"]): c for c in lesson.cells if "table" in c.values}


def _line_in(error: BaseException, template: str) -> int:
    """The line of the template at which `error` was raised: Jinja puts it into the traceback."""
    line, trace = getattr(error, "lineno", None) or 1, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename.endswith(template):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def summary_pages(catalog: Catalog, executed: dict[str, Executed]) -> dict[Path, str]:
    """The pages of all templates, path -> content; `executed` holds every lesson's last run.

    Raises CourseError with file and line where a template asks for what is not there, or where
    the page of a unit leaves out one of its lessons.
    """
    folder = catalog.root / TEMPLATES
    loader = jinja2.FileSystemLoader(folder)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    facts = Facts(catalog, executed)
    names = ("lesson", "measured", "row", "minutes", "runs")
    pages, problems = {}, []
    for name in environment.list_templates(extensions=["md"]):
        try:
            text = environment.get_template(name).render({n: getattr(facts, n) for n in names})
        except (NotThere, jinja2.TemplateError) as error:
            problems.append(Problem(f"{TEMPLATES}/{name}", _line_in(error, name), str(error)))
            continue
        pages[catalog.root / "docs" / name] = text
        problems += _left_out(catalog, name, text)
    if problems:
        raise CourseError(problems)
    return pages


def _left_out(catalog: Catalog, name: str, text: str) -> Iterator[Problem]:
    """Lessons of a unit that its page does not list."""
    if name.startswith("units/"):
        unit = Path(name).stem
        for lesson_id in catalog.lessons:
            if lesson_id.startswith(f"{unit}/") and f"(../lessons/{lesson_id}.md)" not in text:
                message = f"no line for {lesson_id}: add {{{{ row('{lesson_id}', 'when') }}}}"
                yield Problem(f"{TEMPLATES}/{name}", 1, message)
