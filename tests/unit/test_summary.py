"""Pages that sum lessons up hold what the cells printed, and refuse what no lesson has."""

import pytest
from conftest import GOOD

from course.cache import Executed, Record
from course.catalog import read_catalog
from course.errors import CourseError
from course.summary import NotThere, printed_table, summary_pages

TABLE = '# %% table="costs"\nprint("way       seconds lost")\nprint("in place  0.5")\n\n'
PRINTED = "way       seconds lost\nin place  0.5\nrestart   11.0\n"
RECORD = Record(
    date="2026-01-01", seconds=1, cpu_seconds=1, peak_mb=1, python="3", torch="2", machine="m"
)


@pytest.fixture
def pages(project):
    """Makes the pages of one template; the lesson unit/x has printed the table `costs`."""

    def make(template: str, name: str = "lessons/sum.md", printed: str = PRINTED) -> dict[str, str]:
        root = project({"unit/x": GOOD.replace("# %%\nprint", TABLE + "# %%\nprint", 1)})
        path = root / "docs/data/pages" / name
        path.parent.mkdir(parents=True)
        path.write_text(template)
        catalog = read_catalog(root)
        cell = next(c for c in catalog.lessons["unit/x"].cells if "table" in c.values)
        outputs = {cell.index: [{"output_type": "stream", "name": "stdout", "text": printed}]}
        executed = Executed(
            lesson_id="unit/x",
            key="k",
            outputs=outputs,
            starter_errors={},
            cell_seconds={},
            record=RECORD,
        )
        made = summary_pages(catalog, {"unit/x": executed})
        return {path.relative_to(root).as_posix(): text for path, text in made.items()}

    return make


def test_a_page_holds_what_the_cell_printed(pages):
    ask = "a\n{{ measured('unit/x', 'costs', 'restart', 'seconds lost') }} s\n"
    assert pages(ask) == {"docs/lessons/sum.md": "a\n11.0 s\n"}


REFUSED = {
    "lesson": ("measured('unit/y', 'costs', 'restart', 'seconds lost')", "did you mean 'unit/x'?"),
    "table": ("measured('unit/x', 'cost', 'restart', 'seconds lost')", "did you mean 'costs'?"),
    "row": ("measured('unit/x', 'costs', 'restrat', 'seconds lost')", "did you mean 'restart'?"),
    "column": ("measured('unit/x', 'costs', 'restart', 'second')", "no column in costs"),
    "unit": ("minutes('units')", "no lesson in unit 'units'"),
    "name": ("measurd('x')", "'measurd' is undefined"),
    "syntax": ("measured(", "unexpected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_page_refuses_what_is_not_there(name, pages):
    ask, message = REFUSED[name]
    with pytest.raises(CourseError) as error:
        pages("one\ntwo\n{{ " + ask + " }}\n")
    assert str(error.value).startswith("docs/data/pages/lessons/sum.md:3: ")
    assert message in str(error.value)


def test_a_cell_that_prints_no_table_is_named(pages):
    with pytest.raises(CourseError, match="the cell of table 'costs' in unit/x prints a row"):
        pages("{{ measured('unit/x', 'costs', 'restart', 'seconds lost') }}", printed="a  b\nc d\n")


def test_a_unit_page_lists_all_its_lessons(pages):
    row = "{{ row('unit/x', 'now') }}\n"
    (text,) = pages(row, name="units/unit.md").values()
    assert text == "| [A lesson of the tests](../lessons/unit/x.md) | 10 | now |\n"


def test_a_unit_page_that_leaves_a_lesson_out_is_refused(pages):
    with pytest.raises(CourseError, match=r"units/unit.md:1: no line for unit/x"):
        pages("nothing\n", name="units/unit.md")


def test_printed_table_wants_as_many_columns_as_its_head():
    assert printed_table("a  b c\nx  1\n") == {"x": {"a": "x", "b c": "1"}}
    with pytest.raises(NotThere, match="under the columns"):
        printed_table("a  b\nx  1  2\n")
