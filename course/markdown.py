"""A lesson's Markdown, turned into what the site builder or Colab understands."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from latex2mathml.converter import convert

from course.lesson import MARKDOWN, Lesson

CODE = re.compile(r"(^```.*?^```[ \t]*$|^~~~.*?^~~~[ \t]*$|`+[^`\n]+`+)", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?![\w$])", re.DOTALL)
ITEM = re.compile(r" *([-*+]|\d+[.)]) {0,4}(?=\S|$)")
LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` applied to all that is not code."""
    parts = CODE.split(text)
    return "".join(part if n % 2 else change(part) for n, part in enumerate(parts))


def math_to_mathml(text: str) -> str:
    """`$…$` and `$$…$$` outside code as MathML, which browsers show without any script."""

    def one(match: re.Match[str]) -> str:
        block = match[1] is not None
        text = convert((match[1] or match[2]).strip(), display="block" if block else "inline")
        text = re.sub(r"<(\w+)([^<>]*?) ?/>", r"<\1\2></\1>", text)  # as HTML wants it
        before = match.string[: match.start()].rpartition("\n")[2]
        if block or not re.fullmatch(r"[\s>*+-]*(\d+[.)])?\s*", before):
            return text
        return f"<span>{text}</span>"  # a line that begins with <math> would end the paragraph

    return outside_code(text, lambda part: MATH.sub(one, part))


def for_python_markdown(text: str, inside_item: bool = False) -> str:
    """CommonMark text so that Python-Markdown gives the same lists, tables and quotes.

    Python-Markdown wants a blank line before a list or table, four spaces for what belongs to a
    list item, and `1.` rather than `1)`. Colab, which follows CommonMark, wants none of these.
    """
    lines = text.split("\n")
    result: list[str] = []
    done = 0
    for token in (t for t in MARKDOWN.parse(text) if t.level == 0 and t.map and t.nesting >= 0):
        begin, end = token.map
        result += lines[done:begin]
        block = lines[begin:end]
        is_list = token.type in ("bullet_list_open", "ordered_list_open")
        apart = is_list and not inside_item or token.type in ("table_open", "fence")
        if apart and result and result[-1].strip():
            result.append("")
        if token.type == "blockquote_open":
            inner = "\n".join(re.sub(r"^ {0,3}> ?", "", line) for line in block)
            block = [f"> {line}".rstrip() for line in for_python_markdown(inner).split("\n")]
        elif is_list:
            block = [line for item in _items(block) for line in _item(item)]
        elif token.type == "paragraph_open":  # a line that begins with "24." is no list
            block = block[:1] + [re.sub(r"^( *\d+)([.)] )", r"\1\\\2", line) for line in block[1:]]
        result += block
        done = end
        if token.type == "fence" and inside_item:
            result.append("")
    return "\n".join(result + lines[done:])


def _items(block: list[str]) -> list[list[str]]:
    """The lines of a list, by item."""
    tokens = MARKDOWN.parse("\n".join(block))
    starts = [t.map[0] for t in tokens if t.type == "list_item_open" and t.level == 1]
    return [block[a:b] for a, b in zip(starts, [*starts[1:], len(block)], strict=True)]


def _item(lines: list[str]) -> list[str]:
    """A list item, with what belongs to it four spaces in."""
    head = ITEM.match(lines[0])
    width = len(head[0])
    rest = [line[width:] if not line[:width].strip() else line.lstrip() for line in lines[1:]]
    inner = for_python_markdown("\n".join([lines[0][width:], *rest]), inside_item=True)
    first, *rest = inner.rstrip("\n").split("\n")
    if "" in rest or not lines[-1].strip():
        rest.append("")  # the next item must not look like part of the last paragraph
    return [f"{head[1].replace(')', '.')} {first}", *(f"    {line}".rstrip() for line in rest)]


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
