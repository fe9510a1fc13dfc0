"""`course serve`: save a lesson, see its page."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import GOOD, HEAD, SETUP

OTHER = HEAD + SETUP + "# %%\nprint('other')\n"
PATIENCE = 60.0  # seconds; a save that was not seen by then never will be


@pytest.fixture
def preview(project) -> Iterator[tuple[Path, Callable[[str], str], Path]]:
    """A project, a function that gets a page of its preview, and the log of the preview."""
    root = project({"unit/x": GOOD, "unit/y": OTHER})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = root / "serve.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "course.cli", "serve", "--address", address],
            cwd=root,
            stdout=stream,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    found = re.search(r"site_url: *https?://[^/]+(/\S*)", (root / "mkdocs.yml").read_text())
    below = found[1].rstrip("/") if found else ""

    def get(page: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{address}{below}/{page}/", timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    yield root, get, log
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 0, log.read_text()
    assert not get("lessons/unit/x"), "nothing listens any more"


def wait_until(holds: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_a_save_is_seen_and_a_broken_lesson_leaves_the_page_as_it_was(preview):
    root, get, log = preview
    file = root / "notebooks/unit/x.py"
    wait_until(lambda: "What is two" in get("lessons/unit/x"), log)
    assert "other" in get("lessons/unit/y")

    prose = GOOD.replace("What is two", "What do you get for two")
    file.write_text(prose)
    wait_until(lambda: "What do you get for two" in get("lessons/unit/x"), log)
    assert "other" in get("lessons/unit/y"), "the other page is still there"
    assert "to run" not in log.read_text().split("changed: ")[1], "prose runs nothing"

    file.write_text(prose.replace("print(2 + 2)", "print(2 + 2003)"))
    wait_until(lambda: "2005" in get("lessons/unit/x"), log)

    file.write_text(prose.replace("print(2 + 2)", "print(1 / 0)"))
    wait_until(lambda: "ZeroDivisionError" in log.read_text(), log)
    assert "2005" in get("lessons/unit/x"), "the page of the last run that passed"

    (root / "notebooks/unit/y.py").write_text(OTHER.replace("'other'", "'changed meanwhile'"))
    wait_until(lambda: log.read_text().count("ZeroDivisionError") == 2, log)
    file.write_text(prose.replace("print(2 + 2)", "print(2 + 2004)"))
    wait_until(lambda: "2006" in get("lessons/unit/x"), log)
    wait_until(lambda: "changed meanwhile" in get("lessons/unit/y"), log)
