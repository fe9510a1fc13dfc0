"""Everything an author can get wrong gives one clear line with file, line and cause."""

import asyncio

import psutil
import pytest
from conftest import EXERCISE, GOOD, HEAD, QUIZ, SETUP

from course import run as run_module
from course.cache import Cache
from course.catalog import read_catalog
from course.errors import CourseError
from course.run import run_lesson
from course.watch import MARK

CELL = HEAD + SETUP + "# %%\n"
STATIC = {
    "unknown feature": (
        GOOD.replace("switch-hop:", "switch-hoop:"),
        "(did you mean 'switch-hop'?)",
    ),
    "field missing": (GOOD.replace("#     minutes: 10\n", ""), "'minutes' is missing"),
    "field misspelled": (GOOD.replace("minutes: 10", "minuts: 10"), "(did you mean 'minutes'?)"),
    "no check": (GOOD.replace('tags=["check"]', ""), "has no check"),
    "no solution": (GOOD.replace('tags=["solution"]', ""), "has no solution"),
    "quiz without right answer": (GOOD.replace("- [x]", "- [ ]"), "no right answer"),
    "quiz with two": (GOOD.replace("- [ ]", "- [x]"), "2 right answers"),
    "quiz without feedback": (GOOD.replace("#   > Count again.\n", ""), "without feedback"),
    "link to nowhere": (GOOD.replace("is two", "is [two](two.py)"), "link to nowhere: 'two.py'"),
    "link that is code": (
        GOOD.replace("is two", "is [two](javascript:alert%282%29)"),
        "a link that is code",
    ),
    "image without words": (
        GOOD.replace("is two", "is ![](https://x.org/a.png)"),
        "without alt text",
    ),
    "figure without words": (CELL + "show(fig)\n", "figure without alt text"),
    "name of the kit": (
        HEAD + SETUP + "from course.kit import run_ranks\n\n# %%\nlooked_up = 1\n",
        "'looked_up' is a name of course/kit.py",
    ),
    "job without function": (
        GOOD.replace("#     features:", "#     job: {function: doubl}\n#     features:"),
        "'job' names 'doubl', no function of this lesson (did you mean 'double'?)",
    ),
    "not UTF-8": (GOOD.encode() + b"# \xff\n", "byte 0xff is not valid UTF-8"),
    "unknown tag": (GOOD.replace('tags=["quiz"]', 'tags=["quizz"]'), "(did you mean 'quiz'?)"),
    "raw in Colab": (GOOD.replace("# What is", "# !!! note\n# What is"), "shown raw in Colab"),
    "unknown claim": (
        CELL.rstrip() + ' tags=["claim"] claim="x"\nassert 1\n',
        "claim 'x' is not in",
    ),
}


@pytest.mark.parametrize("name", STATIC)
def test_reading_refuses(name, project):
    text, message = STATIC[name]
    with pytest.raises(CourseError) as error:
        read_catalog(project({"unit/x": text}))
    assert message in str(error.value)
    assert str(error.value).startswith("notebooks/unit/x.py:")


def test_nav_and_files_agree(project):
    with pytest.raises(CourseError, match=r"notebooks/unit/x.py:1: .*not in nav"):
        read_catalog(project({"unit/x": GOOD}, nav=[]))


def test_nav_without_file(project):
    with pytest.raises(CourseError, match=r"mkdocs.yml:\d+: nav names lesson 'unit/y'"):
        read_catalog(project({"unit/x": GOOD}, nav=["unit/x", "unit/y"]))


def test_duplicate_slug(project):
    with pytest.raises(CourseError, match="slug 'x' is also used by"):
        read_catalog(project({"unit/x": GOOD, "other/x": GOOD}))


RUNNING = {
    "raises": (CELL + "1 / 0\n", 27, "the cell raises: ZeroDivisionError"),
    "starter passes": (
        HEAD + SETUP + EXERCISE.replace("raise NotImplementedError", "return 2 * x"),
        "def double",
        "the starter passes its check",
    ),
    "solution fails": (
        HEAD + SETUP + EXERCISE.replace("return 2 * x", "return x"),
        "assert double",
        "the solution fails its check",
    ),
    "does not raise": (
        CELL.rstrip()
        + ' tags=["raises"]\nfrom course.kit import expect_error\n'
        + "with expect_error(ValueError):\n    pass\n",
        "with expect_error",
        "nothing was raised",
    ),
    "raises another": (
        CELL.rstrip()
        + ' tags=["raises"]\nfrom course.kit import expect_error\n'
        + "with expect_error(ValueError):\n    {}[1]\n",
        "    {}[1]",
        "KeyError",
    ),
    "setup shows": (
        GOOD.replace("import math", "import math\n\nmath.pi"),
        "import math",
        "shows nothing",
    ),
    "endless": (CELL + "while True:\n    pass\n", 27, "endless loop"),
    "killed": (CELL + "import os\nos.kill(os.getpid(), 9)\n", 27, "kernel died"),
    "exits": (CELL + "import os\nos._exit(3)\n", 27, "kernel died"),
    "flood": (CELL + "for i in range(100_000):\n    print('x' * 1000)\n", 27, "printed more than"),
    "allocates": (CELL + "bytearray(30 << 30)\n", 27, "MemoryError"),
    "child": (
        CELL + "import subprocess\nsubprocess.Popen(['sleep', '99'])\n",
        27,
        "child process left behind: sleep 99",
    ),
    "port": (
        CELL + "import socket\ns = socket.create_server(('127.0.0.1', 0))\n",
        27,
        "port left behind",
    ),
    "exposed": (
        CELL
        + "import socket, time\nwith socket.create_server(('0.0.0.0', 0)):\n    time.sleep(3)\n",
        27,
        "open to other machines",
    ),
    "temp": (CELL + "import tempfile\ntempfile.mkdtemp()\n", 27, "temp file left behind"),
    "network": (
        CELL + "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), 1)\n"
        "except OSError:\n    pass\n",
        27,
        "network use",
    ),
}


@pytest.mark.parametrize("name", RUNNING)
def test_running_refuses(name, project, monkeypatch):
    monkeypatch.setattr(run_module, "SLACK", 2)
    text, where, message = RUNNING[name]
    line = where if isinstance(where, int) else text[: text.index(where)].count("\n") + 1
    root = project({"unit/x": text})
    lesson = read_catalog(root).lessons["unit/x"]
    with pytest.raises(CourseError) as error:
        asyncio.run(run_lesson(lesson, root, root / ".cache"))
    assert message in str(error.value)
    assert str(error.value).startswith(f"notebooks/unit/x.py:{line}: ")
    assert not [p for p in psutil.process_iter() if _run_of(p) and str(root) in _run_of(p)]
    assert not list((root / ".cache").glob("runs/*")), "a failed run must not be kept"


def _run_of(process: psutil.Process) -> str:
    try:
        environment = process.environ()
    except psutil.Error:
        return ""
    return environment.get("TORCHINDUCTOR_CACHE_DIR", "") if MARK in environment else ""


def test_good_lesson_runs_and_is_kept(project):
    root = project({"unit/x": GOOD})
    lesson = read_catalog(root).lessons["unit/x"]
    executed = asyncio.run(run_lesson(lesson, root, root / ".cache"))
    assert executed.outputs[1][0]["text"] == "4\n"
    assert "NotImplementedError" in next(iter(executed.starter_errors.values()))
    cache = Cache(root / ".cache")
    cache.store(executed)
    assert cache.load("unit/x", executed.key) == executed
    (file,) = (root / ".cache/runs").iterdir()
    file.write_text(file.read_text().replace("4", "5"))
    assert cache.load("unit/x", executed.key) is None, "a damaged entry must not be used"


def test_quiz_text_is_read(project):
    root = project({"unit/x": HEAD + SETUP + QUIZ})
    (quiz,) = read_catalog(root).lessons["unit/x"].quizzes.values()
    assert [option.right for option in quiz.options] == [False, True]
    assert quiz.options[1].feedback == "As computed above."
