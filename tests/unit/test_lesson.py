"""Reading a lesson file."""

import warnings

import nbformat.v4.nbbase
from conftest import GOOD

from course.lesson import read_lesson


def test_equal_random_cell_ids_are_no_matter_for_the_author(project, monkeypatch):
    monkeypatch.setattr(nbformat.v4.nbbase, "random_cell_id", lambda: "b212c6bd")
    root = project({"unit/x": GOOD + "\n# unlike any text that was read before\n"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lesson = read_lesson(root / "notebooks/unit/x.py", root)
    assert len(lesson.cells) > 3
