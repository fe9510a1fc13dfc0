"""Whatever the machine does to a build: a clear message, nothing wrong published, then it works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOOD, HEAD, SETUP
from test_build import BOTH, built, course, runs_of, tree

COMMAND = [sys.executable, "-m", "course.cli", "site"]


def mounted(root: Path, mount: str) -> subprocess.CompletedProcess:
    """Build with a mount that only this build sees."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("a mount needs root and util-linux")
    inside = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    return subprocess.run([*inside, *COMMAND], cwd=root, capture_output=True, text=True)


def builds_rightly(root: Path) -> None:
    """The next build is as if nothing had been."""
    built(root)
    page = (root / "docs/lessons/unit/x.md").read_text()
    assert "4\n" in page and (root / "site/lessons/unit/x/index.html").exists()
    assert not runs_of(root)


MOUNTS = {
    "a full disk": "mount -t tmpfs -o size=64k none .cache",
    "a full disk for pages": "mkdir -p docs/lessons && mount -t tmpfs -o size=4k none docs/lessons",
    "a read-only cache": "mount --bind .cache .cache && mount -o remount,ro,bind .cache",
}


@pytest.mark.parametrize("name", MOUNTS)
def test_what_cannot_be_written_is_said_in_one_line(name, project):
    root = project(BOTH)
    (root / ".cache").mkdir()
    done = mounted(root, MOUNTS[name])
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 2, done.stderr
    assert "No space left" in done.stderr or "Read-only file system" in done.stderr
    assert not (root / "site").exists()
    builds_rightly(root)


def test_two_builds_at_once(project):
    root = project(BOTH)
    builds = [
        subprocess.Popen(
            COMMAND, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    ends = [build.communicate(timeout=120) for build in builds]
    assert [build.returncode for build in builds] == [0, 0], ends
    assert sum("waiting" in out for out, _ in ends) == 1
    assert sum("none run" in out for out, _ in ends) == 1, "the second one uses what the first ran"
    right = tree(root / "site")
    builds_rightly(root)
    assert tree(root / "site") == right


def test_a_damaged_result_is_made_anew(project):
    root = project(BOTH)
    built(root)
    (kept,) = (root / ".cache/runs").glob("unit--x-*.json")
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    assert "1 up to date, 1 to run" in built(root)
    builds_rightly(root)


def test_results_with_dates_in_the_future_do_not_displace_new_ones(project):
    root = project({"unit/x": GOOD})
    for number in range(7):
        path = root / "notebooks/unit/x.py"
        path.write_text(GOOD.replace("print(2 + 2)", f"print(2 + 2)  # {number}"))
        assert "1 to run" in built(root)
        assert "none run" in built(root), "what ran last is kept"
        for file in (root / ".cache/runs").iterdir():
            os.utime(file, (4e9, 4e9 + number))


def test_a_path_with_spaces_and_umlauts(project, tmp_path):
    there = tmp_path / "Kurs für alle 日本 'x'"
    root = project(BOTH)
    there.mkdir()
    for name in ("mkdocs.yml", "constraints.txt", "docs", "notebooks"):
        shutil.move(root / name, there / name)
    builds_rightly(there)
    assert course(there, "notebooks").returncode == 0 and course(there, "check").returncode == 0


@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"TZ": "Pacific/Kiritimati", "LANG": ""}])
def test_locale_and_time_zone_change_nothing(variables, project, monkeypatch):
    root = project({"unit/x": GOOD.replace("print(2 + 2)", "print(2 + 2)\nprint('Größe ≤ 4')")})
    built(root)
    right = tree(root / "site")
    shutil.rmtree(root / "site")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "none run" in built(root)
    assert tree(root / "site") == right
    shutil.rmtree(root / ".cache")
    builds_rightly(root)
    assert "Größe ≤ 4" in (root / "docs/lessons/unit/x.md").read_text("utf-8")


def test_twenty_children_are_named_once_and_ended(project):
    starts = "import subprocess\nfor _ in range(20):\n    subprocess.Popen(['sleep', '77'])\n"
    root = project({"unit/x": HEAD + SETUP + "# %%\n" + starts})
    done = course(root, "site")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "child process left behind (20 of them): sleep 77" in done.stderr
    assert not runs_of(root)
