"""Build the site from rendered pages, and preview it while lessons are edited."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import minify_html

from course.cache import write_whole
from course.errors import CourseError, Problem
from course.watch import MARK, new_mark

# Names, punctuation and spaces, as Pygments marks them: shown like unmarked text.
PLAIN_TOKEN = re.compile(r'<span class="(?:n|nn|p|w|bp|nb|o|fm|vm)">([^<]*)</span>')
INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.S)
POLICY = (
    "default-src 'self'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'"
)
WHOLE = {"keep_closing_tags": True, "keep_html_and_head_opening_tags": True}
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
DAY = 24 * 60 * 60


def _state_of(root: Path, target: Path, epoch: str) -> str:
    """A hash of all that the site is made from, and of which files `target` has by now."""
    state = hashlib.sha256(epoch.encode() + Path(__file__).read_bytes())
    single = [root / name for name in ("mkdocs.yml", "constraints.txt")]
    trees = [path for name in ("docs", "overrides") for path in (root / name).rglob("*")]
    for path in sorted(path for path in (*single, *trees) if path.is_file()):
        state.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        state.update(path.read_bytes())
    for path in sorted(target.rglob("*")):
        about = path.stat()
        state.update(f"{path.relative_to(target)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return state.hexdigest()


def build_site(root: Path, target: Path) -> None:
    """Build the whole site with mkdocs, strictly, then put it in place of `target` in one step.

    Does nothing where `target` is what it built last, from the same files, on the same day.
    Raises CourseError with what mkdocs said; `target` is then as it was.
    """
    # The day, not the second: builds of one day from one cache give the same bytes.
    epoch = os.environ.get("SOURCE_DATE_EPOCH", str(int(time.time() // DAY * DAY)))
    built = root / ".cache" / "site.state"
    if built.exists() and built.read_text("utf-8") == _state_of(root, target, epoch):
        return
    built.unlink(missing_ok=True)
    _build(root, target, epoch)
    write_whole(built, _state_of(root, target, epoch))


def _build(root: Path, target: Path, epoch: str) -> None:
    new = root / ".cache" / f"site-{os.getpid()}"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(new)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, **QUIET, MARK: new_mark()}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(new, ignore_errors=True)
        lines = [line for line in done.stderr.splitlines() if line and not line.startswith("INFO")]
        if "Traceback (most recent call last):" in lines:
            lines = lines[-1:]
        raise CourseError(Problem("mkdocs.yml", 1, "mkdocs refused:\n" + "\n".join(lines)))
    for page in new.rglob("*.html"):
        page.write_text(secured(_lighter(page.read_text("utf-8"))), "utf-8")
    old = root / ".cache" / f"site-{os.getpid()}-old"
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _lighter(html: str) -> str:
    """A page without needless space and marks of code tokens that have the plain colour."""
    return minify_html.minify(PLAIN_TOKEN.sub(r"\1", html), **WHOLE)


def secured(html: str) -> str:
    """A page that tells the browser to run no script but the site's own, and to ask nobody else.

    Inline scripts of the theme are allowed by their hash, those within the article are not.
    Mermaid puts styles into its drawings, so these are allowed. See https://www.w3.org/TR/CSP3/.
    """
    before, _, lesson = html.partition("<article")
    theme = before + lesson.rpartition("</article>")[2]
    hashes = sorted(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in set(INLINE_SCRIPT.findall(theme))
    )
    policy = POLICY.format(scripts=" ".join(hashes))
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return html.replace("<meta charset=utf-8>", f"<meta charset=utf-8>{meta}", 1)


def serve(root: Path, address: str, changed: Callable[[list[Path]], None]) -> None:
    """Preview the site at `address`, and call `changed` with each lesson file that was saved."""
    # Dirty: build only pages that changed. Titles in others' navigation follow at the next start.
    command = [sys.executable, "-m", "mkdocs", "serve", "--quiet", "--dirty", "-a", address]
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
        *root.glob("docs/data/pages/**/*.md"),
        root / "course/kit.py",
    ]
    return {path: path.stat().st_mtime_ns for path in sources if path.exists()}
