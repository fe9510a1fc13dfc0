"""The notebooks as a learner runs them: an older torch, none of our packages, no network.

A stand-in for Colab: a fresh environment with torch 2.13.0, numpy, matplotlib and ipykernel.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT
from jupyter_client import KernelManager
from nbclient import NotebookClient

from course.learner import learner_notebook
from course.lesson import Cell, Lesson

LESSONS = sorted(
    path.relative_to(ROOT / "notebooks").with_suffix("").as_posix()
    for path in (ROOT / "notebooks").glob("*/*.py")
)
OLD = "torch==2.13.0"
GIVEN = ("numpy", "matplotlib", "ipykernel")
KERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


def pinned(name: str) -> str:
    """The line of constraints.txt for package `name`."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Iterator[Path]:
    """The Python of an environment like Colab's: an older torch, and no package of ours."""
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, OLD, *map(pinned, GIVEN)], check=True)
    yield python
    shutil.rmtree(folder)  # several GB, and pytest would keep the last three


def clean_environment(**more: str) -> dict[str, str]:
    """Our environment without what would let the learner's Python find our packages."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in hidden} | more


def setup_cell(catalog) -> str:
    """The first code cell of a learner's notebook."""
    lesson = catalog.lessons[LESSONS[0]]
    notebook = nbformat.reads(learner_notebook(lesson, catalog), as_version=4)
    return next(cell.source for cell in notebook.cells if cell.cell_type == "code")


def torch_of(python: Path) -> str:
    """The installed version, asked of a fresh process."""
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


def run_cells(python: Path, sources: list[str], folder: Path, **variables: str) -> list[list]:
    """The outputs of code cells run in order by a kernel of `python`, errors included."""
    manager = KernelManager(transport="ipc", connection_file=str(folder / "k.json"))
    manager.kernel_spec.argv = [str(python), *KERNEL]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    client = NotebookClient(notebook, km=manager, allow_errors=True, timeout=600)
    try:
        client.execute(env=clean_environment(**variables), cwd=str(folder))
    finally:
        manager.shutdown_kernel(now=True)
    return [cell.outputs for cell in notebook.cells]


def test_setup_cell_stops_where_torch_is_imported(python, catalog, tmp_path):
    """Runs first: it needs the older torch."""
    assert torch_of(python).startswith("2.13.0")
    (imported, stopped) = run_cells(python, ["import torch", setup_cell(catalog)], tmp_path)
    assert not imported
    (error,) = stopped
    assert error.ename == "RestartNeeded"
    assert error.traceback == [error.evalue], "one line, no traceback"
    assert "restart the runtime" in error.evalue
    assert torch_of(python).startswith("2.13.0")


def test_setup_cell_upgrades_an_older_torch(python, catalog, tmp_path):
    ask = "import torch; print(torch.__version__)"
    setup, asked = run_cells(python, [setup_cell(catalog), ask], tmp_path)
    assert not _error(setup), setup
    assert asked[0].text.startswith("2.14.1")


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_notebook_runs_offline_without_our_packages(lesson_id, python, catalog, tmp_path):
    if not torch_of(python).startswith("2.14"):
        run_cells(python, [setup_cell(catalog)], tmp_path)
    lesson = catalog.lessons[lesson_id]
    notebook = nbformat.reads(learner_notebook(lesson, catalog), as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    log = tmp_path / "network.log"
    outputs = run_cells(
        python,
        sources,
        tmp_path,
        PYTHONPATH=str(ROOT / "course/sandbox"),
        COURSE_NETWORK_LOG=str(log),
    )
    failed = [s for s, out in zip(sources, outputs, strict=True) if _error(out)]
    checks = [f"# The check: run it after your change.\n{c.source}" for c in checks_of(lesson)]
    assert failed == checks, "the starters' checks fail, nothing else does"
    assert not log.exists(), log.read_text()


def checks_of(lesson: Lesson) -> list[Cell]:
    """The check cells of the lesson's exercises, in order."""
    return [exercise.check for exercise in lesson.exercises.values()]


def _error(outputs: list) -> bool:
    return any(output.output_type == "error" for output in outputs)
