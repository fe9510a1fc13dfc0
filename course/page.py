"""Render an executed lesson as a plain Markdown page with figure files beside it."""

import html
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from course.cache import Executed, write_whole
from course.catalog import Catalog
from course.figure import dark_copy, pixels, tidy
from course.job import LAUNCH, job_file
from course.kit_source import kit_colours
from course.lesson import Cell, Exercise, Lesson, Quiz, verdict
from course.markdown import (
    block_html,
    fence,
    for_python_markdown,
    inline_html,
    link_target,
    math_to_mathml,
    outside_code,
    rewrite_links,
)

LONG, HEAD = 24, 16  # an output of more lines than LONG shows HEAD lines and folds the rest
COVERAGE = {
    "runs": "runs on this CPU",
    "stand-in": "stand-in: same mechanism, other hardware",
    "inspect": "inspected: code or wheel, not run",
    "hardware": "needs the hardware",
}


def render_page(
    lesson: Lesson, executed: Executed, catalog: Catalog, folder: Path
) -> dict[Path, str]:
    """The files of a lesson's page, path -> content; nothing is written.

    `folder`: where pages go, docs/lessons. Figures stand beside the page, `<slug>-<n>.svg`.
    """
    page = _Page(lesson, executed, catalog, folder)
    page.build()
    files = {folder / f"{lesson.id}.md": "\n".join(page.parts).rstrip() + "\n"}
    return files | page.figures


def write_pages(files: dict[Path, str], folder: Path, whole: bool) -> None:
    """Write files that changed, each in one step; with `whole`, remove all that is not in them."""
    for path, content in files.items():
        if not path.exists() or path.read_bytes() != content.encode("utf-8"):
            write_whole(path, content)
    if whole and folder.exists():
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_file() and path not in files:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


class _Page:
    """Collects the parts of one page."""

    def __init__(self, lesson: Lesson, executed: Executed, catalog: Catalog, folder: Path) -> None:
        self.lesson, self.executed, self.catalog, self.folder = lesson, executed, catalog, folder
        self.parts: list[str] = []
        self.figures: dict[Path, str] = {}

    def add(self, *lines: str) -> None:
        self.parts += [*lines, ""]

    def build(self) -> None:
        self._head()
        tasks = {e.starter.index - 1: e for e in self.lesson.exercises.values()}
        inside = {
            cell.index
            for e in self.lesson.exercises.values()
            for cell in (e.starter, e.hint, e.solution, e.check)
            if cell
        }
        for cell in self.lesson.cells:
            if cell.index in tasks:
                self._exercise(cell, tasks[cell.index])
            elif cell.index in self.lesson.quizzes:
                self._quiz(cell.index, self.lesson.quizzes[cell.index])
            elif cell.index in inside or "instructor" in cell.tags:
                continue
            elif cell.kind == "markdown":
                self.add(self._text(cell))
            else:
                self._code(cell)
        self._foot()

    # --- text -------------------------------------------------------------------------------

    def _text(self, cell: Cell) -> str:
        text = for_python_markdown(cell.source)
        text = outside_code(text, lambda p: p.replace("<details>", "<details markdown>"))
        return rewrite_links(math_to_mathml(text), self._link)

    def _link(self, target: str) -> str:
        """A link of the lesson as it must read on the page."""
        path, anchor = link_target(target, self.lesson, self.catalog.root)
        if not path:
            return target
        here = self.folder / self.lesson.unit
        if path.startswith("notebooks/") and path.endswith(".py"):
            other = path.removeprefix("notebooks/").removesuffix(".py")
            if other in self.catalog.lessons:
                return os.path.relpath(self.folder / f"{other}.md", here) + anchor
        if path.startswith("docs/"):
            return os.path.relpath(self.catalog.root / path, here) + anchor
        repository = self.catalog.repository
        return f"{repository.url}/blob/{repository.branch}/{path}{anchor}"

    # --- head and foot ----------------------------------------------------------------------

    def _head(self) -> None:
        meta, lesson = self.lesson.meta, self.lesson
        self.add(
            "---",
            f"title: {_yaml(meta.title)}",
            f"description: {_yaml(meta.summary)}",
            "---",
        )
        self.add(f"# {meta.title}", "", f"{meta.summary}")
        self.add(*self._card())
        self.add("<h2 class='minor' id='objectives'>After this lesson you can</h2>")
        self.add("\n".join(f"- {line}" for line in meta.objectives))
        if meta.prerequisites:
            titles = [
                f"[{self.catalog.lessons[i].meta.title}]({os.path.relpath(i, lesson.unit)}.md)"
                for i in meta.prerequisites
            ]
            self.add(f"Read first: {', '.join(titles)}.")

    def _card(self) -> list[str]:
        """The header card: how long, on what, what is covered how, and where to open it."""
        record, meta, repository = self.executed.record, self.lesson.meta, self.catalog.repository
        facts = {
            "Time": f"{meta.minutes} minutes",
            "Level": meta.level,
            "Ran on": f"{record.machine}; no GPU",
            "Versions": f"torch {record.torch}, Python {record.python}",
            "Last run": f"<time datetime='{record.date}'>{record.date}</time>",
            "Run time": f"{record.seconds:.0f} s",
            "Peak memory": f"{record.peak_mb} MB",
        }
        links = {
            "Open in Colab": repository.colab(self.lesson.id),
            "Kaggle": repository.kaggle(self.lesson.id),
            "Notebook (.ipynb)": repository.blob(f"{self.lesson.id}.ipynb"),
            "Script (.py)": repository.blob(f"{self.lesson.id}.py"),
        }
        features = [self._feature_line(name, how) for name, how in meta.features.items()]
        return [
            '<div class="lesson-card">',
            "<dl>",
            *(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts.items()),
            "</dl>",
            '<ul class="lesson-features">',
            *features,
            "</ul>",
            '<p class="lesson-buttons">',
            *(
                f'<a class="md-button md-button--small" href="{html.escape(url)}">{text}</a>'
                for text, url in links.items()
            ),
            "</p>",
            "</div>",
        ]

    def _feature_line(self, name: str, how: str) -> str:
        feature = self.catalog.features[name]
        return (
            f'<li><a href="../../features/#{name}">{inline_html(feature.title)}</a> '
            f'<span class="badge badge--status">{html.escape(feature.status)}</span> '
            f'<span class="badge badge--{how}">{COVERAGE[how]}</span></li>'
        )

    def _foot(self) -> None:
        meta, repository = self.lesson.meta, self.catalog.repository
        self.add("## Key points")
        self.add("\n".join(f"- {line}" for line in meta.keypoints))
        self.add("## What moved in 2.15")
        self.add(meta.moved_in_215)
        self.add("## Sources")
        self.add(
            "\n".join(
                f"- [{source.title}]({source.url})" + (f", {source.date}" if source.date else "")
                for source in meta.sources
            )
        )
        if meta.job:
            self._job()
        record = self.executed.record
        body = f"Lesson: {self.lesson.id}\ntorch {record.torch}, run {record.date}\n\nWhat I saw:\n"
        report = (
            f"{repository.url}/issues/new?title={quote(self.lesson.id + ': ')}&body={quote(body)}"
        )
        self.add(
            f"[Edit this lesson]({repository.edit(self.lesson.id)}) · [Report a problem]({report})",
            "{ .lesson-foot }",
        )

    def _job(self) -> None:
        """The lesson's job as a file, and the files that start it on several machines."""
        slug, name = self.lesson.id.split("/")[1], f"{self.lesson.meta.job.function}.py"
        memory = self.catalog.root / ".cache" / "jobs" / f"{self.lesson.id}.py"
        text = job_file(self.lesson, self.executed.program, memory)
        self.figures[self.folder / self.lesson.id / name] = text
        starters = [f"[{file}](../../downloads/distributed/{file})" for file in LAUNCH]
        self.add("## On several machines")
        self.add(
            f"[{name}]({slug}/{name}) is the job of this lesson in one file. "
            f"{', '.join(starters[:-1])} and {starters[-1]} start it."
        )

    # --- code, outputs, exercises, quizzes ---------------------------------------------------

    def _code(self, cell: Cell) -> None:
        source = fence(cell.source, "python")
        if "setup" in cell.tags:
            self.add(*_folded("setup", "Setup: imports and helpers", source))
        elif "hide-input" in cell.tags:
            self.add(*_folded("code-more", "Code of this cell", source))
        else:
            self.add(*_unsearched(source))
        for claim in cell.claims:
            says = self.catalog.claims[claim].says
            self.add(f"[Claim checked: {inline_html(says)}](../claims.md#{claim})", "{ .claim }")
        self._outputs(cell)

    def _outputs(self, cell: Cell) -> None:
        text = ""
        for output in self.executed.outputs.get(cell.index, []):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                self._output_text(text, cell)
                text = ""
                self._figure(data["image/svg+xml"], output["metadata"])
            else:
                text += output.get("text") or _joined(data.get("text/plain", "")) + "\n"
        self._output_text(text, cell)

    def _output_text(self, text: str, cell: Cell) -> None:
        lines = text.rstrip().splitlines()
        if not lines:
            return
        kind = "output output--error" if "raises" in cell.tags else "output"
        if "hide-output" in cell.tags:
            summary = f"Output ({len(lines)} lines)"
            self.add(*_folded("output-more", summary, *_output(kind, lines)))
        elif len(lines) > LONG:
            self.add(*_output(kind, lines[:HEAD]))
            summary = f"{len(lines) - HEAD} more lines of output"
            self.add(*_folded("output-more", summary, *_output(kind, lines[HEAD:])))
        else:
            self.add(*_output(kind, lines))

    def _figure(self, svg: str | list[str], metadata: dict[str, Any]) -> None:
        svg, alt = tidy(_joined(svg)), metadata["alt"]
        number = len(self.figures) // 2 + 1
        names = [f"{self.lesson.slug}-{number}{end}.svg" for end in ("", "-dark")]
        light = kit_colours()
        for name, content in zip(names, (svg, dark_copy(svg, light)), strict=True):
            self.figures[self.folder / self.lesson.unit / name] = content
        width, height = pixels(svg)
        words = re.sub(r"([\[\]\\])", r"\\\1", " ".join(alt.split()))
        size = f'{{ width="{width}" height="{height}" loading="lazy" }}'
        self.add(
            '<figure class="plot" markdown>',
            f"![{words}]({names[0]}#only-light){size}",
            f"![{words}]({names[1]}#only-dark){size}",
            "</figure>",
        )

    def _exercise(self, task: Cell, exercise: Exercise) -> None:
        dots = "●" * exercise.difficulty + "○" * (3 - exercise.difficulty)
        self.add('<div class="exercise" markdown>')
        self.add(self._text(task))
        self.add(
            f'<p class="exercise-meta"><span aria-hidden="true">{dots}</span> '
            f"difficulty {exercise.difficulty} of 3, {exercise.minutes} minutes</p>"
        )
        self.add(*_unsearched(fence(exercise.starter.source, "python")))
        self.add("The check:", "", *_unsearched(fence(exercise.check.source, "python")))
        if exercise.hint:
            self.add(*_folded("hint", "Hint", self._text(exercise.hint)))
        self.add(
            '<details class="solution" data-search-exclude markdown>',
            "<summary>Solution</summary>",
            "",
            fence(exercise.solution.source, "python"),
        )
        self._outputs(exercise.solution)
        self._outputs(exercise.check)
        self.add("</details>")
        self.add("</div>")

    def _quiz(self, index: int, quiz: Quiz) -> None:
        number = list(self.lesson.quizzes).index(index) + 1
        kind = "checkbox" if quiz.multi else "radio"
        first, _, rest = math_to_mathml(quiz.question).partition("\n\n")
        first = re.sub(r"^#+ .*\n", "", first).strip() or rest
        legend = f"<legend>{number}. {inline_html(first)}</legend>"
        lines = [f'<fieldset class="quiz" data-search-exclude>{legend}']
        if rest and rest != first:
            lines.append(f"<div>{block_html(rest)}</div>")
        if quiz.multi:
            lines.append('<p class="quiz-note">More than one is right.</p>')
        for place, option in enumerate(quiz.options):
            name = f"q{number}-{place + 1}"
            css = "right" if option.right else "wrong"
            lines += [
                f'<div class="quiz-option"><input type="{kind}" name="q{number}" id="{name}">'
                f'<label for="{name}">{inline_html(math_to_mathml(option.text))}</label>',
                f'<div class="quiz-feedback quiz-feedback--{css}">{verdict(option)}'
                f"{inline_html(math_to_mathml(option.feedback))}</div></div>",
            ]
        self.add(*lines, "</fieldset>")


def _folded(css: str, summary: str, *content: str) -> list[str]:
    head = f'<details class="{css}" data-search-exclude markdown>', f"<summary>{summary}</summary>"
    return [*head, "", *content, "", "</details>"]


def _unsearched(content: str) -> list[str]:
    """Code, kept out of the search index: people search for what the text calls things."""
    return ["<div data-search-exclude markdown>", "", content, "</div>"]


def _output(css: str, lines: list[str]) -> list[str]:
    return [
        f'<div class="{css}" data-search-exclude markdown>',
        "",
        fence("\n".join(lines)),
        "</div>",
    ]


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
