"""A rank's program holds what the function needs, and nothing that only looks alike."""

import pytest

from course import kit

SIZE = 3
mesh = object()  # a global with the name of a local below, and no way to write it out


def helper() -> int:
    return SIZE


def uses_local_names() -> int:
    mesh = helper()
    return mesh


def uses_what_cannot_be_written() -> object:
    return mesh


def test_local_variables_are_not_followed():
    text = kit.program_of(uses_local_names)
    assert "SIZE = 3" in text and "def helper" in text
    names: dict = {}
    exec(text, names)
    assert names["uses_local_names"]() == 3


def test_what_cannot_be_written_out_is_refused():
    with pytest.raises(ValueError, match="a rank cannot get mesh = <object"):
        kit.program_of(uses_what_cannot_be_written)
