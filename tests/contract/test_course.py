"""The real lessons, their notebooks and the built site. Needs `make site` to have run."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

from course.cache import Cache
from course.check import stale_notebooks, typed_numbers
from course.learner import learner_notebook
from course.watch import SCRATCH

LESSONS = sorted(
    path.relative_to(ROOT / "notebooks").with_suffix("").as_posix()
    for path in (ROOT / "notebooks").glob("*/*.py")
)


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_run_is_within_its_limits(lesson_id, catalog):
    lesson = catalog.lessons[lesson_id]
    executed = Cache(ROOT / ".cache").latest(lesson, ROOT)
    assert executed, "run 'make site' first"
    assert executed.record.peak_mb <= 3072
    assert executed.starter_errors.keys() == {e.check.index for e in lesson.exercises.values()}
    code = {cell.index for cell in lesson.cells if cell.kind == "code"}
    assert executed.outputs.keys() == code
    assert not list(typed_numbers(lesson, executed))


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_notebook_is_valid_and_the_same_each_time(lesson_id, catalog):
    lesson = catalog.lessons[lesson_id]
    text = learner_notebook(lesson, catalog)
    assert text == learner_notebook(lesson, catalog)
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "course.kit" not in text, "a learner has no package of ours"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_notebooks_are_up_to_date(catalog):
    assert not list(stale_notebooks(catalog))


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_page_is_light(lesson_id):
    page = (ROOT / "site/lessons" / lesson_id / "index.html").read_bytes()
    assert len(page) <= 150 * 1024
    assert len(gzip.compress(page)) <= 30 * 1024


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_page_names_no_folder_of_the_machine(lesson_id):
    page = (ROOT / "site/lessons" / lesson_id / "index.html").read_text(encoding="utf-8")
    for folder in (ROOT, Path.home(), Path(tempfile.gettempdir(), SCRATCH), sys.prefix):
        assert f"{folder}/" not in page


class _Nesting(HTMLParser):
    """Remembers elements that are open, and end tags that close something else."""

    VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[tuple] = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append((tag, self.getpos()))


def test_elements_of_pages_are_closed():
    for page in (ROOT / "site").rglob("*.html"):
        nesting = _Nesting()
        nesting.feed(page.read_text(encoding="utf-8"))
        assert not nesting.wrong and not nesting.open, (page, nesting.wrong, nesting.open)


def test_links_and_anchors_of_pages_resolve():
    for page in (ROOT / "site").rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        for target in set(re.findall(r'href="([^"#:]*)#([^"]+)"', html)):
            file = (page.parent / target[0]).resolve() if target[0] else page
            file = file / "index.html" if file.is_dir() else file
            ids = re.findall(r'id="([^"]+)"', file.read_text(encoding="utf-8"))
            assert target[1] in ids, f"{page}: {target}"


def test_search_index_is_small():
    index = json.loads((ROOT / "site/search/search_index.json").read_text())
    for lesson_id in LESSONS:
        docs = [d for d in index["docs"] if d["location"].startswith(f"lessons/{lesson_id}/")]
        assert docs, lesson_id
        assert len(gzip.compress(json.dumps(docs).encode())) <= 15 * 1024


def test_zensical_builds_the_same_lessons(tmp_path):
    settings = tmp_path / "mkdocs.yml"
    for name in ("docs", "overrides"):
        shutil.copytree(ROOT / name, tmp_path / name)
    settings.write_text((ROOT / "mkdocs.yml").read_text())
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for builder in (tmp_path / "site", ROOT / "site"):
        built = {p.relative_to(builder).as_posix() for p in builder.glob("lessons/**/index.html")}
        assert {f"lessons/{lesson_id}/index.html" for lesson_id in LESSONS} <= built


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_lesson_is_a_script(lesson_id, tmp_path):
    warnings = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    script = ROOT / "notebooks" / f"{lesson_id}.py"
    done = subprocess.run(
        [sys.executable, *warnings, str(script)],
        cwd=tmp_path,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
