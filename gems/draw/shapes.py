"""The few SVG elements we draw with, and their colours."""

from __future__ import annotations

from html import escape

INK, SOFT, GRID, FLOOR, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#f5f7fa", "#ffffff"
BOLD = 'font-weight="600"'

# Colours of a kind of action in the first and in the second replica on a rank. They
# stay apart for colour-blind eyes; text is white on the first and ink on the second.
ACTIONS = {
    "F": ("forward", "#2f6db5", "#a9cbf0"),
    "B": ("backward", "#c2571a", "#f6bd93"),
    "I": ("input gradient", "#c2571a", "#f6bd93"),
    "W": ("weight gradient", "#1c7f7a", "#a3dad6"),
    "R": ("recompute", "#6b7d1f", "#d3df9b"),
    "A": ("all-reduce of gradients", "#7b3fa0", "#7b3fa0"),
    "U": ("unshard weights", "#a0527b", "#a0527b"),
    "D": ("reshard weights", "#8a94a0", "#8a94a0"),
    "S": ("store", "#8f6b1d", "#d8c08a"),
    "L": ("load", "#3d7f4f", "#a9d3b3"),
    "T": ("all-reduce of tied gradients", "#5d2f7a", "#5d2f7a"),
    "O": ("optimizer step", "#3d3a8c", "#3d3a8c"),
    "G": ("all-gather of updated weights", "#a0527b", "#a0527b"),
    ">": ("message", "#52606d", "#9aa5b1"),
}
MEMORY = {
    "weights": "#52606d",
    "gradients": "#7b3fa0",
    "optimizer": "#b9a3cf",
    "activations": "#4f9bd9",
    "boundary": "#e0a526",
    "communication": "#d0587e",
}
# Colours of stages in turn; neighbours differ in lightness, too.
STAGES = ("#2f6db5", "#e0a526", "#1c7f7a", "#d0587e", "#52606d", "#4f9bd9", "#7b3fa0", "#c2571a")
DARK = {"#e0a526", "#4f9bd9"}  # of these, the ones that take ink rather than white


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
        f'fill="{fill}"{" " + more if more else ""}/>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, tip: str) -> str:
    """A rectangle of an action, with a tooltip."""
    shape = rect(x, y, width, height, fill, 'class="box" rx="2"')
    return f"{shape[:-2]}><title>{escape(tip)}</title></rect>"


def caption(
    x: float,
    y: float,
    text: str,
    size: int = 12,
    fill: str = INK,
    anchor: str = "start",
    more: str = "",
) -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}"{" " + more if more else ""}>{escape(text)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = GRID) -> str:
    ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line {ends} stroke="{stroke}"/>'


def steps(points: list[tuple[float, float]], stroke: str) -> str:
    """A line through the points."""
    path = "M" + "L".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.4"/>'


def dot(x: float, y: float, radius: float, fill: str, tip: str, more: str = "") -> str:
    """A disc with a tooltip."""
    drawn = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"'
    return f"{drawn}{' ' + more if more else ''}><title>{escape(tip)}</title></circle>"


def area(points: list[tuple[float, float]], fill: str, tip: str) -> str:
    path = "M" + "L".join(f"{_n(x)},{_n(y)}" for x, y in points) + "Z"
    return f'<path d="{path}" fill="{fill}"><title>{escape(tip)}</title></path>'


def arc(
    x1: float, x2: float, y: float, high: float, stroke: str, width: float, tip: str, more: str = ""
) -> str:
    """A bow over (x1, y) to (x2, y), `high` at its top, with an arrow's head at its end."""
    up = y - high * 4 / 3  # a cubic reaches three quarters of the way to its controls
    bow = f"M{_n(x1)},{_n(y)}C{_n(x1)},{_n(up)} {_n(x2)},{_n(up)} {_n(x2)},{_n(y - 5)}"
    head = f"M{_n(x2 - 4)},{_n(y - 7)}L{_n(x2 + 4)},{_n(y - 7)}L{_n(x2)},{_n(y)}Z"
    drawn = f'<path d="{bow}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}"'
    drawn += f' class="arc"{" " + more if more else ""}><title>{escape(tip)}</title></path>'
    return f'{drawn}<path d="{head}" fill="{stroke}"/>'


def page(width: float, height: float, title: str, body: list[str]) -> str:
    """A whole document on white, readable wherever it is shown."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
            f'width="{_n(width)}" height="{_n(height)}" role="img" aria-label="{escape(title)}" '
            'font-family="Inter, Segoe UI, Helvetica, Arial, sans-serif">',
            rect(0, 0, width, height, PAPER),
            *body,
            "</svg>\n",
        )
    )


def legend(x: float, y: float, entries: list[tuple[str, str]]) -> list[str]:
    """Swatches with their names, left to right."""
    drawn = []
    for fill, name in entries:
        drawn += [rect(x, y - 9, 11, 11, fill, 'rx="2"'), caption(x + 16, y, name, 11, SOFT)]
        x += 16 + 6.2 * len(name) + 18
    return drawn


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
