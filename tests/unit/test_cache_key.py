"""A lesson runs again when what it depends on changes, and only then."""

from conftest import GOOD, HEAD, SETUP

from course import cache, kit_source
from course.cache import cache_key
from course.catalog import read_catalog


def test_key_follows_what_a_run_depends_on(project, monkeypatch, tmp_path):
    root = project({"unit/x": GOOD, "unit/y": HEAD + SETUP + "# %%\nprint(1)\n"})
    path = root / "notebooks/unit/x.py"

    def keys() -> tuple[str, str]:
        lessons = read_catalog(root).lessons
        return cache_key(lessons["unit/x"], root), cache_key(lessons["unit/y"], root)

    first = keys()
    path.write_text(GOOD.replace("two and two", "2 and 2"))
    assert keys() == first, "prose is not code"
    path.write_text(GOOD.replace("print(2 + 2)", "print(2 * 2)"))
    assert keys()[0] != first[0] and keys()[1] == first[1], "only the edited lesson"
    path.write_text(GOOD)
    (root / "constraints.txt").write_text("torch==2.15.0\n")
    assert keys()[0] != first[0] and keys()[1] != first[1], "the lock"
    (root / "constraints.txt").write_text("torch==2.14.1\ntorchvision==0.29.1\n")
    monkeypatch.setattr(cache, "torch_version", lambda: "2.13.0")
    assert keys()[0] != first[0] and keys()[1] != first[1], "the torch version"


def test_key_follows_the_kit_functions_that_are_used(project, monkeypatch, tmp_path):
    uses = GOOD.replace("import math", "from course.kit import expect_error")
    root = project({"unit/x": uses, "unit/y": GOOD})
    lessons = read_catalog(root).lessons
    first = [cache_key(lesson, root) for lesson in lessons.values()]
    changed = tmp_path / "kit.py"
    changed.write_text(kit_source.KIT.read_text().replace("nothing was raised", "none"))
    monkeypatch.setattr(kit_source, "KIT", changed)
    second = [cache_key(lesson, root) for lesson in lessons.values()]
    assert second[0] != first[0] and second[1] == first[1]
