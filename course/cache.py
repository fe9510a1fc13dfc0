"""Results of lesson runs, kept by what they depend on.

A key is a hash of the code cells, of the parts of the kit that they use, of the lesson's data
files, of the lock file, and of the Python and torch versions. Change one, and the lesson runs
again; change anything else, and it does not.
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from course.kit_source import used_kit_source
from course.lesson import Lesson

FORMAT = 2  # raise when what a run records changes its meaning, or a rule for runs is added


class Record(BaseModel):
    """How a run went: when, on what, how long, how much memory."""

    date: str  # ISO, UTC
    seconds: float  # wall
    cpu_seconds: float  # of the kernel and all its children
    peak_mb: int  # of the kernel and all its children, proportional set size
    python: str
    torch: str
    machine: str


class Executed(BaseModel):
    """A lesson that ran and passed: the outputs of its code cells, by cell index."""

    lesson_id: str
    key: str
    outputs: dict[int, list[dict[str, Any]]]
    starter_errors: dict[int, str]  # index of the check -> how the starter failed it
    cell_seconds: dict[int, float]
    program: str = ""  # the function that `job` names, as a program of its own
    record: Record


def torch_version() -> str:
    """The version of the installed torch, without importing it; "none" where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def cache_key(lesson: Lesson, root: Path) -> str:
    """The hash of all that a run of `lesson` depends on."""
    parts: dict[str, Any] = {
        "format": FORMAT,
        "cells": [(c.source, sorted(c.tags)) for c in lesson.cells if c.kind == "code"],
        "kit": used_kit_source(lesson),
        "data": {
            path.relative_to(lesson.path.parent).as_posix(): _hash(path.read_bytes())
            for path in sorted(lesson.path.with_suffix("").rglob("*"))
            if path.is_file()
        },
        "sandbox": _hash((Path(__file__).parent / "sandbox/sitecustomize.py").read_bytes()),
        "lock": _hash((root / "constraints.txt").read_bytes()),
        "python": sys.version,
        "torch": torch_version(),
        "job": lesson.meta.job.function if lesson.meta.job else "",
        "limits": [lesson.meta.budget_seconds, lesson.meta.exclusive],
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())[:32]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Cache:
    """A folder with one file a result, and the run times of the last runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, lesson_id: str, key: str) -> Path:
        return self.folder / "runs" / f"{lesson_id.replace('/', '--')}-{key}.json"

    def load(self, lesson_id: str, key: str) -> Executed | None:
        """The kept result; None where there is none, or where its file is damaged."""
        try:
            checksum, _, text = self._file(lesson_id, key).read_text("utf-8").partition("\n")
            if checksum != _hash(text.encode()):
                return None
            return Executed.model_validate_json(text)
        except (OSError, UnicodeDecodeError, ValidationError):
            return None

    def store(self, executed: Executed) -> None:
        """Keep a result; a reader sees the whole file or none."""
        text = executed.model_dump_json()
        file = self._file(executed.lesson_id, executed.key)
        write_whole(file, f"{_hash(text.encode())}\n{text}")
        times = self.times() | {executed.lesson_id: executed.record.seconds}
        write_whole(self.folder / "times.json", json.dumps(times, indent=1, sort_keys=True))

    def latest(self, lesson: Lesson, root: Path) -> Executed | None:
        """The kept result of the lesson as it is now, if it ran."""
        return self.load(lesson.id, cache_key(lesson, root))

    def times(self) -> dict[str, float]:
        """Seconds of the last run of each lesson, to start the longest first."""
        try:
            return json.loads((self.folder / "times.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file so that it is never seen half written: to a neighbour, then rename."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    file.parent.mkdir(parents=True, exist_ok=True)
    name_of_half = {"prefix": f"{file.name}.{os.getpid()}.", "suffix": ".part"}
    handle, name = tempfile.mkstemp(dir=file.parent, **name_of_half)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
