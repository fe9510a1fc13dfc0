"""Results of lesson runs, kept by what they depend on.

A key is a hash of the code cells, of the parts of the kit that they use, of the lesson's data
files, of the lock file, and of the Python and torch versions. Change one, and the lesson runs
again; change anything else, and it does not.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from course.kit_source import used_kit_source
from course.lesson import Lesson

RECORDED = "docs/data/costs.json"  # written by `course report --write`
KEPT = 5  # results of one lesson
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


class Cost(BaseModel):
    """What a run of a lesson takes: seconds of wall and of all cores together, and memory."""

    seconds: float
    cpu_seconds: float
    peak_mb: int


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
    """A folder with one file a result and one a cost: two such folders merge by copying files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, lesson_id: str, key: str) -> Path:
        return self.folder / "runs" / f"{lesson_id.replace('/', '--')}-{key}.json"

    def load(self, lesson_id: str, key: str) -> Executed | None:
        """The kept result; None where there is none, or where its file is damaged."""
        text = read_kept(self._file(lesson_id, key))
        try:
            return None if text is None else Executed.model_validate_json(text)
        except ValidationError:
            return None

    def store(self, executed: Executed) -> None:
        """Keep a result; a reader sees the whole file or none."""
        file = self._file(executed.lesson_id, executed.key)
        keep(file, executed.model_dump_json())
        self._drop_old(executed.lesson_id, file)
        cost = Cost.model_validate(executed.record, from_attributes=True)
        file = self.folder / "costs" / f"{executed.lesson_id.replace('/', '--')}.json"
        write_whole(file, cost.model_dump_json())

    def _drop_old(self, lesson_id: str, new: Path) -> None:
        """Keep a few results of a lesson, to go back to, not all; `new` also by a wrong clock."""
        files = set((self.folder / "runs").glob(self._file(lesson_id, "*").name)) - {new}
        for file in sorted(files, key=lambda file: -file.stat().st_mtime_ns)[KEPT - 1 :]:
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the checkout for one build at a time; a second one says so, and waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another build is at work in this checkout: waiting for its end …")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def latest(self, lesson: Lesson, root: Path) -> Executed | None:
        """The kept result of the lesson as it is now, if it ran."""
        return self.load(lesson.id, cache_key(lesson, root))

    def costs(self, root: Path, own: bool = True) -> dict[str, Cost]:
        """The cost of each lesson's last run, by id; the recorded one, where it never ran here.

        Without `own` only what the repository records: the same on every machine.
        """
        found = {}
        with contextlib.suppress(OSError, ValidationError):
            text = (root / RECORDED).read_text("utf-8")
            found = TypeAdapter(dict[str, Cost]).validate_json(text)
        for file in sorted((self.folder / "costs").glob("*.json")) if own else []:
            with contextlib.suppress(OSError, ValidationError):
                lesson_id = file.stem.replace("--", "/")
                found[lesson_id] = Cost.model_validate_json(file.read_text("utf-8"))
        return found


def keep(file: Path, text: str, made_from: str = "") -> None:
    """Write `text` under a checksum of it and of what it was made from."""
    write_whole(file, f"{_hash((made_from + text).encode())}\n{text}")


def read_kept(file: Path, made_from: str = "") -> str | None:
    """What `keep` wrote; None where it is missing, damaged, or made from something else."""
    try:
        checksum, _, text = file.read_text("utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if checksum == _hash((made_from + text).encode()) else None


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
