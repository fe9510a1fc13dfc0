"""Read a lesson file (jupytext py:percent) into a checked `Lesson`."""

import ast
import datetime
import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jupytext
import yaml
from markdown_it import MarkdownIt
from nbformat.warnings import DuplicateCellId
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from course.errors import CourseError, Problem, did_you_mean, read_text

Coverage = Literal["runs", "stand-in", "inspect", "hardware"]
TAGS = {
    *("setup", "claim", "raises", "hardware", "exercise", "hint", "solution", "check"),
    *("quiz", "instructor", "compare", "hide-input", "hide-output"),
}
TEXT_TAGS = {"hint", "quiz", "instructor"}
VALUES = {"claim", "hardware", "exercise", "difficulty", "minutes", "multi", "table"}
NOT_OURS = {"tags", "title", "lines_to_next_cell"}  # the last: how jupytext keeps blank lines
LESSON_ID = re.compile(r"^[a-z0-9-]+/[a-z0-9-]+$")
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Source(BaseModel):
    """Where a statement comes from."""

    model_config = ConfigDict(extra="forbid")
    title: str
    url: str = Field(pattern=r"^https://")
    date: datetime.date | None = None


class Job(BaseModel):
    """A function of the lesson that the page also offers as a file for several machines."""

    model_config = ConfigDict(extra="forbid")
    function: str = Field(pattern=r"^[a-z_]\w*$")
    ranks: int = Field(2, ge=2, le=8)
    arguments: dict[str, Any] = {}


class Metadata(BaseModel):
    """The `course:` block in the head of a lesson file; see docs/contributing.md."""

    model_config = ConfigDict(extra="forbid")
    title: str = Field(min_length=5, max_length=80)
    summary: str = Field(min_length=20, max_length=240)
    minutes: int = Field(ge=5, le=90)
    level: Literal["core", "deeper"]
    objectives: list[str] = Field(min_length=1)
    prerequisites: list[str]
    features: dict[str, Coverage] = Field(min_length=1)
    keypoints: list[str] = Field(min_length=1)
    sources: list[Source] = Field(min_length=1)
    moved_in_215: str = Field(min_length=1)
    job: Job | None = None
    exclusive: bool = False
    budget_seconds: int = Field(60, ge=1, le=120)
    budget_reason: str = ""

    @model_validator(mode="after")
    def _reason_for_more(self) -> "Metadata":
        if self.budget_seconds > 60 and not self.budget_reason:
            raise ValueError("more than 60 s needs a budget_reason that says why")
        return self


@dataclass(frozen=True)
class Cell:
    """One cell. `line` is the line in the file where its source begins."""

    index: int
    kind: Literal["code", "markdown"]
    source: str
    line: int
    tags: frozenset[str] = frozenset()
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def claims(self) -> list[str]:
        """The ids of the claims that this cell proves."""
        return [part.strip() for part in str(self.values.get("claim", "")).split(",") if part]


@dataclass(frozen=True)
class Exercise:
    """A task and its cells: the starter fails the check, the solution passes it."""

    name: str
    difficulty: int
    minutes: int
    starter: Cell
    solution: Cell
    check: Cell
    hint: Cell | None = None


@dataclass(frozen=True)
class Option:
    """One answer of a quiz question."""

    text: str
    right: bool
    feedback: str


def verdict(option: Option) -> str:
    """What to put before the feedback of an option: nothing where it says so itself."""
    word = "Right. " if option.right else "Not quite. "
    return "" if option.feedback.lower().startswith(word[:5].lower()) else word


@dataclass(frozen=True)
class Quiz:
    """One question. `multi`: any number of right answers; otherwise exactly one."""

    question: str
    options: list[Option]
    multi: bool


@dataclass(frozen=True)
class Lesson:
    """A lesson, read and checked, not yet run."""

    id: str  # unit/slug
    path: Path
    shown: str  # the path as messages show it: relative to the project
    meta: Metadata
    cells: list[Cell]
    exercises: dict[int, Exercise]  # index of the starter -> exercise
    quizzes: dict[int, Quiz]  # index of the cell -> question

    @property
    def unit(self) -> str:
        """The folder of the lesson."""
        return self.id.split("/")[0]

    @property
    def slug(self) -> str:
        """The file name of the lesson without its ending."""
        return self.id.split("/")[1]

    def problem(self, cell: Cell, message: str, offset: int = 0) -> Problem:
        """A problem at `offset` lines into `cell`."""
        return Problem(self.shown, cell.line + offset, message)


def read_lesson(path: Path, root: Path) -> Lesson:
    """Read, validate and return the lesson at `path` inside the project `root`.

    Raises CourseError with every problem found, each with its line.
    """
    shown = path.relative_to(root).as_posix()
    text = read_text(path, shown)
    try:
        notebook = _notebook(text)
    except (yaml.YAMLError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        message = f"the head of the file cannot be read: {str(error).splitlines()[0]}"
        raise CourseError(Problem(shown, line, message)) from None
    cells = _cells(notebook, text, shown)
    lesson_id = path.relative_to(root / "notebooks").with_suffix("").as_posix()
    problems: list[Problem] = []
    if not LESSON_ID.match(lesson_id):
        problems.append(Problem(shown, 1, "name the file notebooks/<unit>/<slug>.py, a-z 0-9 -"))
    meta = _metadata(notebook.metadata.get("course"), text, shown, problems)
    if meta is None:
        raise CourseError(problems)
    lesson = Lesson(lesson_id, path, shown, meta, cells, {}, {})
    problems += _check_tags(lesson)
    problems += _read_exercises(lesson)
    problems += _read_quizzes(lesson)
    problems += _check_text(lesson, root)
    problems += _check_code(lesson)
    problems += _check_job(lesson, text)
    if problems:
        raise CourseError(sorted(problems, key=lambda problem: problem.line))
    return lesson


@functools.lru_cache(maxsize=256)
def _notebook(text: str) -> Any:
    """The text as a notebook; kept, since a preview reads all lessons at each save."""
    with warnings.catch_warnings():  # two of its random cell ids may be the same; we use none
        warnings.simplefilter("ignore", DuplicateCellId)
        return jupytext.reads(text, fmt="py:percent")


def _cells(notebook: Any, text: str, shown: str) -> list[Cell]:
    """The notebook's cells with the line in the file where each begins."""
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r"# ?%%( |$)", line)]
    if len(starts) != len(notebook.cells):
        message = "text before the first '# %%' line: begin each cell with '# %%'"
        raise CourseError(Problem(shown, 1, message))
    cells = []
    for index, (start, cell) in enumerate(zip(starts, notebook.cells, strict=True)):
        first = start + 1
        while first < len(lines) - 1 and not lines[first].strip():
            first += 1
        values = {k: v for k, v in cell.metadata.items() if k not in NOT_OURS}
        tags = frozenset(cell.metadata.get("tags", []))
        cells.append(Cell(index, cell.cell_type, cell.source, first + 1, tags, values))
    return cells


def _line_of(text: str, words: list[str]) -> int:
    """The line of the head that names the last of `words` that occurs, else the `course:` line."""
    lines = text.splitlines()
    for word in [*reversed(words), "course"]:
        for number, line in enumerate(lines, 1):
            if re.match(rf"#\s+-?\s*{re.escape(word)}\s*:", line):
                return number
    return 1


def _metadata(data: Any, text: str, shown: str, problems: list[Problem]) -> Metadata | None:
    """The checked `course:` block, or None with the reasons in `problems`."""
    if not isinstance(data, dict):
        problems.append(Problem(shown, 1, "no 'course:' block under '# jupyter:' in the head"))
        return None
    try:
        return Metadata.model_validate(dict(data))
    except ValidationError as error:
        for item in error.errors():
            where = [str(part) for part in item["loc"]]
            name = ".".join(where)
            if item["type"] == "missing":
                message = f"metadata field '{name}' is missing: see docs/contributing.md"
            elif item["type"] == "extra_forbidden":
                known = did_you_mean(where[-1], Metadata.model_fields)
                message = f"unknown metadata field '{name}'{known}"
            else:
                message = f"metadata field '{name or 'course'}': {item['msg']}"
            problems.append(Problem(shown, _line_of(text, where), message))
        return None


def _check_tags(lesson: Lesson) -> Iterator[Problem]:
    setups = [cell for cell in lesson.cells if "setup" in cell.tags]
    code = [cell for cell in lesson.cells if cell.kind == "code"]
    if len(setups) != 1 or not code or code[0] is not setups[0]:
        where = setups[-1] if setups else lesson.cells[0]
        yield lesson.problem(where, "the first code cell, and no other, needs tags=['setup']")
    for cell in lesson.cells:
        for tag in sorted(cell.tags - TAGS):
            yield lesson.problem(cell, f"unknown tag '{tag}'{did_you_mean(tag, TAGS)}", -1)
        for name in sorted(cell.values.keys() - VALUES):
            hint = did_you_mean(name, VALUES)
            yield lesson.problem(cell, f"unknown cell value '{name}'{hint}", -1)
        for tag in sorted(cell.tags & TAGS):
            if (tag in TEXT_TAGS) != (cell.kind == "markdown"):
                right = "[markdown]" if tag in TEXT_TAGS else "code"
                yield lesson.problem(cell, f"tag '{tag}' belongs on a {right} cell", -1)
        for tag in ("claim", "hardware", "exercise"):
            if (tag in cell.tags) != (tag in cell.values):
                message = f"tag '{tag}' and {tag}=\"…\" go together on the cell's line"
                yield lesson.problem(cell, message, -1)


def _read_exercises(lesson: Lesson) -> Iterator[Problem]:
    """Fill `lesson.exercises`; each is starter, hint (optional), solution, check, in this order."""
    used: set[int] = set()
    names: set[str] = set()
    for starter in (cell for cell in lesson.cells if "exercise" in cell.tags):
        rest = lesson.cells[starter.index + 1 : starter.index + 4]
        hint = rest.pop(0) if rest and "hint" in rest[0].tags else None
        name = str(starter.values.get("exercise"))
        for tag, cell in zip(("solution", "check"), [*rest, None, None], strict=False):
            if cell is None or tag not in cell.tags:
                yield lesson.problem(
                    starter,
                    f"exercise '{name}' has no {tag}: after the starter come hint (optional), "
                    "solution, check",
                )
                break
        else:
            numbers = [starter.values.get(key) for key in ("difficulty", "minutes")]
            if not all(isinstance(n, int) for n in numbers) or not 1 <= numbers[0] <= 3:
                yield lesson.problem(starter, "an exercise needs difficulty=1..3 and minutes=N", -1)
                continue
            if name in names:
                yield lesson.problem(starter, f"exercise '{name}' occurs twice: rename one", -1)
            names.add(name)
            before = lesson.cells[starter.index - 1] if starter.index else None
            if before is None or before.kind != "markdown" or "quiz" in before.tags:
                yield lesson.problem(starter, f"exercise '{name}' needs its task in a text cell")
            exercise = Exercise(name, *numbers, starter, rest[0], rest[1], hint)
            lesson.exercises[starter.index] = exercise
            used |= {cell.index for cell in (hint, *rest[:2]) if cell}
    for cell in lesson.cells:
        for tag in sorted(cell.tags & {"hint", "solution", "check"}):
            if cell.index not in used:
                yield lesson.problem(cell, f"'{tag}' cell without an exercise before it", -1)


OPTION = re.compile(r"^[-*] \[( |x|X)\] (.*)$")


def read_quiz(cell: Cell) -> tuple[Quiz, list[tuple[int, str]]]:
    """The question in `cell`, and what is wrong with it as (line offset, message)."""
    question: list[str] = []
    options: list[dict[str, Any]] = []
    wrong: list[tuple[int, str]] = []
    for number, line in enumerate(cell.source.splitlines()):
        match = OPTION.match(line)
        if match:
            right = match[1] != " "
            options.append({"text": [match[2]], "right": right, "feedback": [], "line": number})
        elif not options:
            question.append(line)
        elif line.strip().startswith(">"):
            options[-1]["feedback"].append(line.strip()[1:].strip())
        elif line.strip():
            options[-1]["text"].append(line.strip())
    multi = bool(cell.values.get("multi"))
    right = sum(option["right"] for option in options)
    if len(options) < 2:
        wrong.append((0, "a quiz needs at least two options, '- [ ] …' or '- [x] …'"))
    elif right == 0:
        wrong.append((0, "quiz with no right answer: tick one option with '- [x]'"))
    elif right > 1 and not multi:
        wrong.append((0, f"quiz with {right} right answers: tick one, or mark it multi=true"))
    for option in options:
        if not option["feedback"]:
            wrong.append((option["line"], "option without feedback: add '  > why' below it"))
    built = [
        Option(" ".join(option["text"]), option["right"], " ".join(option["feedback"]))
        for option in options
    ]
    return Quiz("\n".join(question).strip(), built, multi), wrong


def _read_quizzes(lesson: Lesson) -> Iterator[Problem]:
    for cell in lesson.cells:
        if "quiz" in cell.tags:
            lesson.quizzes[cell.index], wrong = read_quiz(cell)
            for offset, message in wrong:
                yield lesson.problem(cell, message, offset)


def _check_text(lesson: Lesson, root: Path) -> Iterator[Problem]:
    """Links that lead somewhere, images with words, nothing that Colab shows raw."""
    for cell in (cell for cell in lesson.cells if cell.kind == "markdown"):
        for block in MARKDOWN.parse(cell.source):
            offset = block.map[0] if block.map else 0
            if block.type == "heading_open" and block.tag == "h1":
                yield lesson.problem(cell, "sections begin at '##': the title is metadata", offset)
            for token in block.children or []:
                if token.type == "image" and not token.content.strip():
                    yield lesson.problem(
                        cell, "image without alt text: ![what it shows](…)", offset
                    )
                target = token.attrs.get("href") or token.attrs.get("src")
                if target and not _leads_somewhere(str(target), lesson.path, root):
                    yield lesson.problem(cell, f"link to nowhere: '{target}' is no file", offset)
        fenced = False
        for offset, line in enumerate(cell.source.splitlines()):
            fenced ^= line.lstrip().startswith("```")
            if re.search(r"<img\b(?![^>]*\balt=\"[^\"]+\")", line) and not fenced:
                yield lesson.problem(cell, "image without alt text: <img alt=…>", offset)
            if re.search(r"\]\(\s*<?(javascript|vbscript|data):", line, re.I) and not fenced:
                yield lesson.problem(cell, "a link that is code: link to a page", offset)
            if re.match(r"(!!!|\?\?\?|===|:::)", line) and not fenced:
                message = f"'{line.split()[0]}' is shown raw in Colab: use '> [!NOTE]' or <details>"
                yield lesson.problem(cell, message, offset)


def _leads_somewhere(target: str, lesson: Path, root: Path) -> bool:
    if re.match(r"([a-z]+:|#)", target):
        return True
    file = (lesson.parent / target.split("#")[0]).resolve()
    return file.is_file() and file.is_relative_to(root)


def _check_code(lesson: Lesson) -> Iterator[Problem]:
    for cell in (cell for cell in lesson.cells if cell.kind == "code"):
        try:
            tree = ast.parse(cell.source)
        except SyntaxError as error:
            yield lesson.problem(cell, f"syntax error: {error.msg}", (error.lineno or 1) - 1)
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {node.func.id: node for node in calls if isinstance(node.func, ast.Name)}
        if "raises" in cell.tags and "expect_error" not in names:
            message = "a 'raises' cell needs 'with expect_error(KindOfError):' around the line"
            yield lesson.problem(cell, message)
        if "show" in names and not any(k.arg == "alt" for k in names["show"].keywords):
            message = "figure without alt text: show(fig, alt='what it shows')"
            yield lesson.problem(cell, message, names["show"].lineno - 1)


def _check_job(lesson: Lesson, text: str) -> Iterator[Problem]:
    if lesson.meta.job and (name := lesson.meta.job.function):
        code = "\n".join(cell.source for cell in lesson.cells if cell.kind == "code")
        known = re.findall(r"^def (\w+)", code, re.M)
        if name not in known:
            message = f"'job' names {name!r}, no function of this lesson{did_you_mean(name, known)}"
            yield Problem(lesson.shown, _line_of(text, ["job"]), message)
