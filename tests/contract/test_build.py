"""The build as a user runs it: what runs again, what is published, what a killed build leaves."""

import base64
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import GOOD, HEAD, SETUP

from course.watch import MARK, SCRATCH

OTHER = HEAD + SETUP + "# %%\nprint('other')\n"
BOTH = {"unit/x": GOOD, "unit/y": OTHER}
KILLS = int(os.environ.get("KILLS", "10"))  # `make faults` sets more


def course(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the `course` command in `root`."""
    command = [sys.executable, "-m", "course.cli", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def built(root: Path) -> str:
    """Build the site, which must work; what the command printed."""
    done = course(root, "site")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tree(folder: Path) -> dict[str, str]:
    """The hash of each file below `folder`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def runs_of(root: Path) -> list[psutil.Process]:
    """Living processes of lesson runs of the project `root`."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if MARK in variables and str(root) in variables.get("TORCHINDUCTOR_CACHE_DIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_two_builds_from_one_cache_are_the_same(project):
    root = project(BOTH)
    built(root)
    first = tree(root / "site"), tree(root / "docs/lessons")
    (root / ".cache/site.state").unlink()  # so that the site is really built again
    assert "none run" in built(root)
    assert (tree(root / "site"), tree(root / "docs/lessons")) == first
    for path in [*(root / "docs/lessons").rglob("*.md")]:
        path.unlink()
    built(root)
    assert (tree(root / "site"), tree(root / "docs/lessons")) == first


def test_the_site_is_built_again_where_a_page_or_the_site_changed(project):
    root = project(BOTH)
    built(root)
    page, first = root / "site/lessons/unit/x/index.html", tree(root / "site")
    made = page.stat().st_mtime_ns
    built(root)
    assert page.stat().st_mtime_ns == made, "nothing changed, nothing was built"
    page.write_text("edited by hand")
    built(root)
    assert tree(root / "site") == first
    (root / "docs/more.css").write_text("a {}")
    built(root)
    assert (root / "site/more.css").exists()
    (root / "docs/more.css").unlink()
    built(root)
    assert tree(root / "site") == first


def test_only_what_changed_runs_again(project):
    root = project(BOTH)
    assert "2 to run" in built(root)
    lesson = root / "notebooks/unit/x.py"
    lesson.write_text(GOOD.replace("# What is two and two?", "# And what is two and two?"))
    assert "none run" in built(root)
    assert "And what is two and two?" in (root / "site/lessons/unit/x/index.html").read_text()
    lesson.write_text(GOOD.replace("print(2 + 2)", "print(2 + 3)"))
    said = built(root)
    assert "1 up to date, 1 to run" in said and "unit/y" not in said
    (root / "constraints.txt").write_text("torch==2.14.1\ntorchvision==0.29.1\nnumpy==2.0.0\n")
    assert "2 to run" in built(root)


BROKEN = {
    "a cell that raises": (GOOD.replace("print(2 + 2)", "1 / 0"), "ZeroDivisionError"),
    "a page that cannot be": (GOOD.replace("is two", "is [two](two.py)"), "link to nowhere"),
}


def test_what_a_cell_prints_cannot_act_on_the_page(project):
    evil = "<script>bad()</script><img src=x onerror=bad()> [x](javascript:bad) `</pre>`"
    shows = f"display({{'text/html': {evil!r}, 'text/plain': {evil!r}}}, raw=True)\n"
    raw = "\n# %% [markdown]\n# <script>raw()</script>\n"
    root = project({"unit/x": GOOD + f"\n# %%\nprint({evil!r})\n\n# %%\n{shows}{raw}"})
    built(root)
    for page in (root / "site").rglob("*.html"):
        html = page.read_text()
        assert "<script>bad" not in html and "<img src=x" not in html
        assert not re.search(r"<[^>]*(\son\w+=|href=.?javascript:)", html), page
        policy = re.search(r'http-equiv="?Content-Security-Policy"? content="([^"]*)"', html)
        assert policy and "script-src 'self' 'sha256-" in policy[1], page
        assert "unsafe-inline" not in policy[1].partition("style-src")[0]
        mine = base64.b64encode(hashlib.sha256(b"raw()").digest()).decode()
        assert mine not in policy[1], "a lesson's own script is not let in"
    shown = (root / "site/lessons/unit/x/index.html").read_text()
    assert shown.count("&lt;script>bad()") == 5, "three times as code, twice as output"


@pytest.mark.parametrize("name", BROKEN)
def test_nothing_is_published_where_something_failed(name, project):
    root = project(BOTH)
    built(root)
    before = tree(root / "site")
    text, message = BROKEN[name]
    (root / "notebooks/unit/x.py").write_text(text)
    done = course(root, "site")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("notebooks/unit/x.py:") and message in line
    assert tree(root / "site") == before


def test_check_refuses_a_notebook_that_was_edited(project):
    root = project(BOTH)
    assert course(root, "notebooks").returncode == 0
    assert course(root, "check").returncode == 0
    notebook = root / "notebooks/unit/x.ipynb"
    text = notebook.read_text()
    notebook.write_text(text.replace("print(2 + 2)", "print(5)"))
    done = course(root, "check")
    line = text[: text.index("print(2 + 2)")].count("\n") + 1
    assert done.returncode == 1
    assert done.stderr.startswith(f"notebooks/unit/x.ipynb:{line}: differs from what")


def test_check_flags_a_measured_number_in_prose(project):
    text = GOOD.replace("print(2 + 2)", "print(sum(range(78)))")
    root = project({"unit/x": text.replace("# What is two", "# We saw 3003. What is two")})
    built(root)
    course(root, "notebooks")
    done = course(root, "check")
    assert done.returncode == 1
    assert done.stderr.startswith("notebooks/unit/x.py:")
    assert "the number 3003 repeats an output" in done.stderr


def test_a_build_killed_at_any_moment_leaves_a_state_that_builds(project):
    root = project(BOTH)
    began = time.monotonic()
    built(root)
    whole = time.monotonic() - began
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    for _ in range(KILLS):
        for file in (root / ".cache/runs").glob("*"):
            file.unlink()  # so that the lessons run
        command = [sys.executable, "-m", "course.cli", "site"]
        build = subprocess.Popen(
            command,
            cwd=root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        time.sleep(moments.uniform(0, whole))
        build.send_signal(moments.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        build.wait(30)
        built(root)
        assert "4\n" in (root / "docs/lessons/unit/x.md").read_text(), seed
        right = tree(root / "site")
        assert "none run" in built(root)
        assert tree(root / "site") == right, seed
        assert not runs_of(root), seed
        assert not list((root / ".cache").glob("site-*")), seed
        left = Path(tempfile.gettempdir()).glob(f"{SCRATCH}{build.pid}-*")
        assert not list(left), seed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_build_that_is_asked_to_stop_stops(number, project):
    sleeps = OTHER.replace("print('other')", "import time\ntime.sleep(30)")
    root = project({"unit/x": GOOD, "unit/y": sleeps})
    build = subprocess.Popen(
        [sys.executable, "-m", "course.cli", "site"],
        cwd=root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not runs_of(root):
        time.sleep(0.05)
    time.sleep(1)
    build.send_signal(number)
    assert build.wait(10) != 0
    assert not runs_of(root)
    assert not list(Path(tempfile.gettempdir()).glob(f"{SCRATCH}{build.pid}-*"))
    assert not (root / "site").exists()


def test_soak_reports_each_lesson_and_fails_where_one_fails(project):
    failing = OTHER.replace("print('other')", "import time\nassert time.time() < 0")
    root = project({"unit/x": GOOD, "unit/y": failing})
    done = course(root, "soak", "-n", "2")
    assert done.returncode == 1
    assert re.search(r"unit/x +│ 2 of 2", done.stdout), done.stdout
    assert re.search(r"unit/y +│ 0 of 2", done.stdout), done.stdout
    assert done.stderr.count("the cell raises: AssertionError") == 2
    assert course(root, "soak", "unit/x", "-n", "1").returncode == 0
