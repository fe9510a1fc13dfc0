"""Problems as sentences: where, what is wrong, what to do."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One thing that stops the build: `path:line: message`. The message says what to do."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class CourseError(Exception):
    """One or more problems in what an author wrote, or in what a lesson did."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" (did you mean '{close[0]}'?)" if close else ""


def read_text(path: Path, shown: str) -> str:
    """The text of a UTF-8 file. Raises CourseError with the line of the first wrong byte."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = data[error.start]
        message = f"byte 0x{byte:02x} is not valid UTF-8: save the file as UTF-8"
        raise CourseError(Problem(shown, line, message)) from None
