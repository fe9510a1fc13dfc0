"""A figure drawn once, in a light and a dark copy."""

import re

# Twins of the colours in course/kit.py, chosen for the dark page's background.
DARK = {
    "INK": "#e4e7ee",
    "GREY": "#8d95a8",
    "PAPER": "#1b1f29",
    "BLUE": "#7db0f2",
    "ORANGE": "#f0a35e",
    "GREEN": "#6fc98d",
    "RED": "#f2848f",
    "PURPLE": "#bd9df0",
    "PALE_BLUE": "#24405f",
    "PALE_ORANGE": "#57371c",
    "PALE_GREEN": "#1f4a30",
    "PALE_RED": "#5c2630",
}


def dark_copy(svg: str, light: dict[str, str]) -> str:
    """`svg` with each kit colour (`light`: name -> hex) exchanged for its dark twin."""
    twins = {light[name]: dark for name, dark in DARK.items()}
    pattern = re.compile("|".join(map(re.escape, twins)), re.IGNORECASE)
    # Matplotlib leaves out the fill of what is black, such as text; give the root ours.
    svg = pattern.sub(lambda match: twins[match[0].lower()], svg)
    return svg.replace("<svg ", f'<svg fill="{DARK["INK"]}" ', 1)


def tidy(svg: str) -> str:
    """`svg` without the XML head, comments and metadata block, which no page needs."""
    svg = re.sub(
        r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.S
    )
    return re.sub(r"\n\s*\n+", "\n", svg).strip() + "\n"


def pixels(svg: str) -> tuple[int, int]:
    """Width and height of `svg` in CSS pixels, from its size in points."""
    width, height = (float(re.search(rf'\b{k}="([\d.]+)pt"', svg)[1]) for k in ("width", "height"))
    return round(width * 4 / 3), round(height * 4 / 3)
