"""A small project in a temporary folder, and the real one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from course.catalog import Catalog, read_catalog

ROOT = Path(__file__).parents[1]

HEAD = """\
# ---
# jupyter:
#   course:
#     title: A lesson of the tests
#     summary: After this lesson you can tell that the tests ran a lesson.
#     minutes: 10
#     level: core
#     objectives: [Add two numbers.]
#     prerequisites: []
#     features:
#       switch-hop: runs
#     keypoints: [Two and two is four.]
#     sources:
#       - title: PyTorch
#         url: https://github.com/pytorch/pytorch
#     moved_in_215: Nothing.
#     budget_seconds: 4
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

"""
SETUP = '# %% tags=["setup"]\nimport math\n\n'
EXERCISE = """\
# %% [markdown]
# ### Exercise: double

# %% tags=["exercise"] exercise="double" difficulty=1 minutes=5
def double(x):
    raise NotImplementedError


# %% tags=["solution"]
def double(x):
    return 2 * x


# %% tags=["check"]
assert double(3) == 6
"""
QUIZ = """\
# %% [markdown] tags=["quiz"]
# What is two and two?
#
# - [ ] Five.
#   > Count again.
# - [x] Four.
#   > As computed above.
"""
GOOD = HEAD + SETUP + "# %%\nprint(2 + 2)\n\n" + EXERCISE + "\n" + QUIZ


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Path]:
    """Makes a project with the given lessons, id -> text of the file (str or bytes)."""

    def make(lessons: dict[str, str | bytes], nav: list[str] | None = None) -> Path:
        pages = [f"lessons/{name}.md" for name in (lessons if nav is None else nav)]
        settings = {
            "site_name": "t",
            "repo_url": "https://github.com/o/n",
            "theme": {"name": "material", "font": False},
            "nav": [{"Unit": pages}],
        }
        (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
        (tmp_path / "docs/data").mkdir(parents=True)
        feature = {
            "id": "switch-hop",
            "title": "switch",
            "area": "compiler",
            "hardware": "any",
            "status": "API Unstable",
            "source": "blog",
            "prs": [1],
            "summary": "A switch.",
            "lesson": "unit/planned",
        }
        for name, entries in (("features", [feature]), ("claims", [])):
            (tmp_path / f"docs/data/{name}.yml").write_text(yaml.safe_dump({name: entries}))
        (tmp_path / "constraints.txt").write_text("torch==2.14.1\ntorchvision==0.29.1\n")
        for name, text in lessons.items():
            path = tmp_path / "notebooks" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return make


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    """The real course."""
    return read_catalog(ROOT)
