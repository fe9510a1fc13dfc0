"""The file for torchrun: imports first, no trace of the course, the same functions."""

import ast

from course import job
from course.job import imports_first, tidied, tidy

PROGRAM = """from course.kit import report as report
SIZE = 3
import os as os
def f(a):
    import math
    return math.sqrt(a) + SIZE
from collections.abc import (
    Callable as Callable,
)
f(os)
"""


def test_imports_come_first_and_the_rest_stays():
    text = tidy(imports_first(PROGRAM))
    kinds = [type(node) for node in ast.parse(text).body]
    first = next(i for i, kind in enumerate(kinds) if kind not in (ast.Import, ast.ImportFrom))
    assert all(kind not in (ast.Import, ast.ImportFrom) for kind in kinds[first:])
    assert "course" not in text
    assert "import os\n" in text and "Callable" not in text, "as it is used; nothing unused"
    assert "    import math\n" in text and "SIZE = 3" in text


def test_a_formatted_file_is_remembered_and_a_damaged_memory_is_not_believed(tmp_path, monkeypatch):
    file, right = tmp_path / "job.py", tidy(PROGRAM)
    assert tidied(PROGRAM, file) == right
    kept = file.read_text()
    file.write_text(kept.replace("import", "imp"))
    assert tidied(PROGRAM, file) == right, "the checksum is wrong"
    assert tidied(PROGRAM + "\nx = 1\n", file) != right, "made from something else"
    file.write_text(kept)
    with monkeypatch.context() as context:
        context.setattr(job, "tidy", None)
        assert tidied(PROGRAM, file) == right, "not formatted again"
    file.unlink()
    file.mkdir()
    assert tidied(PROGRAM, file) == right, "a memory that cannot be read or written"
