"""Turn a lesson into the notebook that a learner opens: starters, checks, folded solutions."""

import ast
import hashlib
import re
from pathlib import Path

import nbformat

from course.catalog import Catalog
from course.install_torch import CPU_INDEX
from course.kit_source import used_kit_source
from course.lesson import Cell, Exercise, Lesson, Quiz, verdict
from course.markdown import link_target, outside_code, rewrite_links

ALERT = re.compile(r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\][ \t]*$", re.MULTILINE)


def learner_notebook(lesson: Lesson, catalog: Catalog) -> str:
    """The text of the lesson's .ipynb: the same bytes for the same lesson, kit and settings."""
    maker = _Maker(lesson, catalog)
    cells = [maker.head(), maker.setup()]
    inside: set[int] = set()
    for cell in lesson.cells:
        if cell.index in inside or "instructor" in cell.tags:
            continue
        if cell.index in lesson.exercises:
            exercise = lesson.exercises[cell.index]
            cells += maker.exercise(exercise)
            parts = (exercise.hint, exercise.solution, exercise.check)
            inside |= {part.index for part in parts if part}
        elif cell.index in lesson.quizzes:
            cells.append(maker.quiz(lesson.quizzes[cell.index]))
        elif cell.kind == "markdown":
            cells.append(_text(maker.text(cell)))
        else:
            source = _without_kit_import(cell.source)
            if source.strip():
                cells.append(_code(source))
    cells.append(maker.foot())
    for position, cell in enumerate(cells):
        digest = hashlib.sha256(f"{position}\n{cell.cell_type}\n{cell.source}".encode())
        cell["id"] = digest.hexdigest()[:12]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "colab": {"provenance": [], "toc_visible": True},
    }
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    notebook.nbformat_minor = 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


class _Maker:
    """Builds the cells of one notebook."""

    def __init__(self, lesson: Lesson, catalog: Catalog) -> None:
        self.lesson, self.catalog = lesson, catalog

    def head(self) -> nbformat.NotebookNode:
        meta, repository = self.lesson.meta, self.catalog.repository
        badge = "https://colab.research.google.com/assets/colab-badge.svg"
        goals = "\n".join(f"- {line}" for line in meta.objectives)
        page = f"{repository.site_url}/lessons/{self.lesson.id}/"
        return _text(
            f"# {meta.title}\n\n{meta.summary}\n\n"
            f"[![Open in Colab]({badge})]({repository.colab(self.lesson.id)})\n\n"
            f"{meta.minutes} minutes · runs on a plain CPU · "
            f"[the same lesson as a page, with all outputs]({page})\n\n"
            f"**After this lesson you can**\n\n{goals}"
        )

    def setup(self) -> nbformat.NotebookNode:
        """The version check and, below it, the parts of the kit that the lesson uses."""
        source = (Path(__file__).parent / "setup_cell.py").read_text(encoding="utf-8")
        pins = pinned(self.catalog.root, "torch", "torchvision")
        for name, value in (
            ("$TORCHVISION", pins["torchvision"]),
            ("$TORCH", pins["torch"]),
            ("$CPU_INDEX", CPU_INDEX),
        ):
            source = source.replace(name, value)
        return _code(f"{source}\n{used_kit_source(self.lesson)}".rstrip())

    def text(self, cell: Cell) -> str:
        """A text cell with links that lead out of the notebook, and alerts as Colab shows them."""
        text = rewrite_links(cell.source, self._link)
        return outside_code(text, lambda p: ALERT.sub(lambda m: f"> **{m[1].title()}**\n>", p))

    def _link(self, target: str) -> str:
        path, anchor = link_target(target, self.lesson, self.catalog.root)
        repository = self.catalog.repository
        if not path:
            return target
        other = path.removeprefix("notebooks/").removesuffix(".py")
        if other in self.catalog.lessons:
            return repository.colab(other)
        if path.startswith("docs/") and path.endswith(".md"):
            page = path.removeprefix("docs/").removesuffix(".md")
            return f"{repository.site_url}/{page}/{anchor}"
        return f"{repository.url}/blob/{repository.branch}/{path}{anchor}"

    def exercise(self, exercise: Exercise) -> list[nbformat.NotebookNode]:
        """Starter, check, and below them the hint and the solution, folded."""
        starter = f"# Difficulty {exercise.difficulty} of 3, about {exercise.minutes} minutes.\n"
        below = ""
        if exercise.hint:
            below += _folded("Hint", self.text(exercise.hint))
        solution = f"```python\n{exercise.solution.source}\n```"
        below += _folded("Solution", solution)
        return [
            _code(starter + exercise.starter.source),
            _code("# The check: run it after your change.\n" + exercise.check.source),
            _text(below.rstrip()),
        ]

    def quiz(self, quiz: Quiz) -> nbformat.NotebookNode:
        """A question, its options by letter, and the answers, folded."""
        letters = "abcdefgh"
        note = " (more than one is right)" if quiz.multi else ""
        options = "\n".join(
            f"- **{c}.** {o.text}" for c, o in zip(letters, quiz.options, strict=False)
        )
        answers = "\n".join(
            f"- **{letter}.** {verdict(option)}{option.feedback}"
            for letter, option in zip(letters, quiz.options, strict=False)
        )
        return _text(
            f"{quiz.question}{note}\n\n{options}\n\n{_folded('Answers', answers)}".rstrip()
        )

    def foot(self) -> nbformat.NotebookNode:
        meta = self.lesson.meta
        points = "\n".join(f"- {line}" for line in meta.keypoints)
        sources = "\n".join(f"- [{source.title}]({source.url})" for source in meta.sources)
        return _text(
            f"## Key points\n\n{points}\n\n## What moved in 2.15\n\n{meta.moved_in_215}\n\n"
            f"## Sources\n\n{sources}"
        )


def pinned(root: Path, *packages: str) -> dict[str, str]:
    """The versions of `packages` in constraints.txt."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {package: pins[package].split("+")[0].strip() for package in packages}


def _without_kit_import(source: str) -> str:
    """A cell without `from course.kit import …`: the setup cell holds those functions."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("course"):
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip("\n")


def _folded(summary: str, content: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>\n\n"


def _code(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source)


def _text(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(source)
