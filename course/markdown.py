"""A lesson's Markdown, turned into what the site builder or Colab understands."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from latex2mathml.converter import convert

from course.lesson import MARKDOWN, Lesson

CODE = re.compile(r"(^```.*?^```[ \t]*$|^~~~.*?^~~~[ \t]*$|`+[^`\n]+`+)", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?![\w$])", re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` applied to all that is not code."""
    parts = CODE.split(text)
    return "".join(part if n % 2 else change(part) for n, part in enumerate(parts))


def math_to_mathml(text: str) -> str:
    """`$…$` and `$$…$$` outside code as MathML, which browsers show without any script."""

    def one(match: re.Match[str]) -> str:
        block = match[1] is not None
        return convert((match[1] or match[2]).strip(), display="block" if block else "inline")

    return outside_code(text, lambda part: MATH.sub(one, part))


def rewrite_links(text: str, rewrite: Callable[[str], str]) -> str:
    """`text` with `rewrite` applied to the target of every link and image outside code."""
    return outside_code(text, lambda p: LINK.sub(lambda m: m[1] + rewrite(m[2]) + m[3], p))


def link_target(target: str, lesson: Lesson, root: Path) -> tuple[str, str]:
    """Where a relative link in a lesson leads: its path from the project's root, and `#anchor`.

    Both are empty for an absolute link or one within the page.
    """
    if re.match(r"([a-z]+:|#)", target):
        return "", ""
    path, _, anchor = target.partition("#")
    file = os.path.relpath((lesson.path.parent / path).resolve(), root)
    return Path(file).as_posix(), f"#{anchor}" if anchor else ""


def inline_html(text: str) -> str:
    """One paragraph of Markdown as HTML without the paragraph, inert to a second Markdown pass."""
    parts = re.split(r"(<[^>]*>)", MARKDOWN.renderInline(text).replace("\n", " "))
    return "".join(
        part if n % 2 else re.sub(r"[\[\]*_`\\|]", lambda m: f"&#{ord(m[0])};", part)
        for n, part in enumerate(parts)
    )


def block_html(text: str) -> str:
    """Markdown as HTML, with no blank line in it, so that it can stand inside raw HTML."""
    return re.sub(r"\n{2,}", "\n", MARKDOWN.render(text)).strip()


def fence(text: str, language: str = "text") -> str:
    """A fenced block that no backticks in `text` can end."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    ticks = "`" * (longest + 1)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}\n"
