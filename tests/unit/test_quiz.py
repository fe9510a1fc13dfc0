"""The feedback of a quiz option begins with the verdict, once."""

import pytest

from course.lesson import Option, verdict


@pytest.mark.parametrize(
    ("feedback", "right", "before"),
    [
        ("Right. It trains.", True, ""),
        ("Count again.", True, "Right. "),
        ("Not quite: count again.", False, ""),
        ("Right where it stands.", False, "Not quite. "),
    ],
)
def test_verdict_is_said_once(feedback: str, right: bool, before: str) -> None:
    assert verdict(Option("x", right, feedback)) == before
