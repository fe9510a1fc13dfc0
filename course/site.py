"""Build the site from rendered pages, and preview it while lessons are edited."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import minify_html

from course.errors import CourseError, Problem
from course.watch import MARK, new_mark

# Names, punctuation and spaces, as Pygments marks them: shown like unmarked text.
PLAIN_TOKEN = re.compile(r'<span class="(?:n|nn|p|w|bp|nb|o|fm|vm)">([^<]*)</span>')
WHOLE = {"keep_closing_tags": True, "keep_html_and_head_opening_tags": True}
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
DAY = 24 * 60 * 60


def build_site(root: Path, target: Path) -> None:
    """Build the whole site with mkdocs, strictly, then put it in place of `target` in one step.

    Raises CourseError with what mkdocs said; `target` is then as it was.
    """
    new = root / ".cache" / f"site-{os.getpid()}"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(new)]
    # The day, not the second: builds of one day from one cache give the same bytes.
    epoch = {"SOURCE_DATE_EPOCH": str(int(time.time() // DAY * DAY))}
    environment = {**epoch, **os.environ, **QUIET, MARK: new_mark()}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(new, ignore_errors=True)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        raise CourseError(Problem("mkdocs.yml", 1, "mkdocs refused:\n" + "\n".join(lines)))
    for page in new.rglob("*.html"):
        page.write_text(_lighter(page.read_text("utf-8")), "utf-8")
    old = root / ".cache" / f"site-{os.getpid()}-old"
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _lighter(html: str) -> str:
    """A page without needless space and marks of code tokens that have the plain colour."""
    return minify_html.minify(PLAIN_TOKEN.sub(r"\1", html), **WHOLE)


def serve(root: Path, address: str, changed: Callable[[list[Path]], None]) -> None:
    """Preview the site at `address`, and call `changed` with each lesson file that was saved."""
    command = [sys.executable, "-m", "mkdocs", "serve", "--quiet", "-a", address]
    server = subprocess.Popen(command, cwd=root, env={**os.environ, **QUIET, MARK: new_mark()})
    seen = _saved(root)
    try:
        while server.poll() is None:
            time.sleep(0.3)
            now = _saved(root)
            files = [path for path, when in now.items() if seen.get(path) != when]
            seen = now
            if files:
                changed(files)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()


def _saved(root: Path) -> dict[Path, int]:
    """Each source of lessons and its time of last change."""
    sources = [
        *root.glob("notebooks/*/*.py"),
        *root.glob("docs/data/*.yml"),
        root / "course/kit.py",
    ]
    return {path: path.stat().st_mtime_ns for path in sources if path.exists()}
