"""What authors write as CommonMark, for Colab, comes out the same on the site."""

import re
from collections import Counter

import markdown
import pytest
import yaml
from conftest import ROOT

from course.lesson import MARKDOWN
from course.markdown import for_python_markdown, math_to_mathml

COUNTED = ("ul", "ol", "li", "table", "tr", "pre", "h3", "em", "strong")
CASES = {
    "list after text": "Text:\n- a\n- b",
    "nested by two": "- a\n  - b\n    - c\n- d",
    "nested by three": "1. a\n   - b\n   - c\n2. d",
    "parentheses": "1) a\n2) b",
    "fence in item": "- a\n\n  ```python\n  x = 1\n  ```\n\n- b",
    "fence in item, close": "1. a\n   ```python\n   x = 1\n   ```\n2. b",
    "fence after text": "Text:\n```\nx\n```",
    "table after text": "Text:\n| a | b |\n|---|---|\n| 1 | 2 |",
    "paragraphs in item": "- a\n\n  more\n\n  - b\n- c",
    "lazy line": "- a\nlazy\n- b",
    "list in quote": "> Text:\n> - a\n>   - b",
    "star and plus": "* a\n* b\n\nText\n\n+ c",
    "ordered in bullet": "- a\n  1. x\n  2. y\n     - z\n- b",
    "number at line start": "1. it holds\n   24. So\n2. b\n\nText\n25. more",
    "fence then text": "- a\n  ```\n  x\n  ```\n  more\n- b",
    "list in code": "```\nText:\n- a\n  - b\n```",
    "text after list": "- a\n- b\n\nText",
}


def tags(html: str) -> Counter[str]:
    return Counter(name for name in re.findall(r"<(\w+)", html) if name in COUNTED)


@pytest.fixture(scope="module")
def site() -> markdown.Markdown:
    """Python-Markdown with the settings of the site."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!!python/name:", lambda *_: None)
    loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), loader)
    entries = [e if isinstance(e, dict) else {e: {}} for e in settings["markdown_extensions"]]
    options = {name: given for entry in entries for name, given in entry.items()}
    options["pymdownx.superfences"] = {}
    options["pymdownx.highlight"] = {"use_pygments": False}
    return markdown.Markdown(extensions=list(options), extension_configs=options)


@pytest.mark.parametrize("name", CASES)
def test_same_structure(name, site):
    text = CASES[name]
    assert tags(site.convert(for_python_markdown(text))) == tags(MARKDOWN.render(text))


def test_all_lessons_have_the_same_structure(site, catalog):
    for lesson in catalog.lessons.values():
        for cell in lesson.cells:
            if cell.kind == "markdown" and "<details" not in cell.source:
                wanted = tags(MARKDOWN.render(cell.source))
                found = tags(site.convert(for_python_markdown(cell.source)))
                assert found == wanted, f"{lesson.shown}:{cell.line}"


@pytest.mark.parametrize(
    "text",
    ["Sum:\n$a$. More", "$a$ more", "- $a$ more", "1. $a$ more", "> Sum:\n> $a$", "`x`\n$a$ b"],
)
def test_inline_math_stays_in_its_paragraph(text, site):
    html = site.convert(for_python_markdown(math_to_mathml(text)))
    assert html.count("<p>") <= 1, html
    inside = r"<(p|li)>(?:(?!</\1>).)*<math[^>]*display=\"inline\""
    assert re.search(inside, html, re.DOTALL), html


def test_display_math_stands_alone(site):
    html = site.convert(for_python_markdown(math_to_mathml("Sum:\n\n$$a$$\n\nMore")))
    assert re.search(r"</p>\s*<math[^>]*display=\"block\"", html), html
