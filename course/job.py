"""The job of a lesson as one file that torchrun can start, derived from the run of the lesson."""

import ast
import contextlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

from course.cache import keep, read_kept
from course.kit_source import KIT, kit_source
from course.lesson import Job, Lesson

LAUNCH = ("launch.sh", "launch.slurm", "launch.yaml")  # under docs/downloads/distributed

HEAD = '''"""{function}: the job of the lesson "{title}", in one file.

On machine k of {ranks}: FIRST=node0 NODES={ranks} NODE_RANK=k bash launch.sh {function}.py
Lines that begin with the sign U+001E are its reports, as JSON. License: Apache-2.0.
Derived from {shown}, whose functions these are, unchanged.
"""

'''
MAIN = """
if __name__ == "__main__":
    {function}({arguments})
    if dist.is_initialized():  # left open, it can abort the process at its end (SIGABRT)
        dist.destroy_process_group()
"""


def asks_for_program(job: Job) -> str:
    """The cell that makes a kernel, which has run the lesson, print the job as a program."""
    return (
        "from course.kit import program_of as _program_of\n"
        f"print(_program_of({job.function}), end='')"
    )


def job_file(lesson: Lesson, program: str, memory: Path) -> str:
    """The file for torchrun: the program with the kit's part in it, and a call at its end.

    `memory`: a file that keeps the result for the next time, and may be deleted at any time.
    """
    job = lesson.meta.job
    tree = ast.parse(program)
    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "course.kit"
        for alias in node.names
    ]
    text = kit_source(names, KIT.read_text(encoding="utf-8")) if names else ""
    text += "\n" + program
    text += MAIN.format(
        function=job.function,
        arguments=", ".join(f"{name}={value!r}" for name, value in job.arguments.items()),
    )
    head = HEAD.format(
        function=job.function, title=lesson.meta.title, ranks=job.ranks, shown=lesson.shown
    )
    return tidied(head + imports_first(text), memory)


def imports_first(text: str) -> str:
    """The program with its imports at the top, without those of the kit."""
    lines, imports = text.splitlines(keepends=True), ["import torch.distributed as dist\n"]
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            span = slice(node.lineno - 1, node.end_lineno)
            if getattr(node, "module", None) != "course.kit":
                imports += lines[span]
            lines[span] = [""] * (node.end_lineno - node.lineno + 1)
    return "".join(imports + ["\n"] + lines)


def tidied(text: str, memory: Path) -> str:
    """`tidy(text)`, from the file `memory` if that holds it: ruff takes 0.1 s for each lesson."""
    made_from = f"{importlib.metadata.version('ruff')}\n{Path(__file__).read_text('utf-8')}\n{text}"
    done = read_kept(memory, made_from)
    if done is None:
        done = tidy(text)
        with contextlib.suppress(OSError):  # it only saves time
            keep(memory, done, made_from)
    return done


def tidy(text: str) -> str:
    """The program as ruff sorts its imports and formats it."""
    ruff = [sys.executable, "-m", "ruff"]
    line = ["--line-length=100", "--isolated", "--quiet", "-"]
    for command in (["check", "--select=I,F401,PLC0414", "--fix", "--unsafe-fixes"], ["format"]):
        done = subprocess.run(
            [*ruff, *command, *line], input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return text
