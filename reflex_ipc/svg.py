"""The pieces that every plot here is made of, as SVG text that is readable on light and on dark pages."""

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#3b7dd8", "#d9822b", "#3c9d5c", "#b0498c", "#7a68c9", "#8a8a3a", "#c0504d", "#4f9aa8")
INK = "#767676"  # readable on white and on black
FONT = 'font-family="sans-serif" font-size="13"'


def tick(top: float) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten, at most 8 of them."""
    power = 10.0 ** math.floor(math.log10(top / 8)) if top > 0 else 1.0
    return next(power * m for m in (1, 2, 5, 10) if top / (power * m) <= 8)


def document(title: str, width: float, height: float, body: Sequence[str]) -> str:
    """The whole picture, with its title in the upper left."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" {FONT} role="img">'
    inner = "\n".join([f"<title>{escape(title)}</title>", text(8, 24, title, weight="bold"), *body])
    return f"{head}\n{inner}\n</svg>\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", size: int = 0) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"' + (f' font-size="{size}"' if size else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 1.0, dashes: str = "") -> str:
    at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {at} stroke="{INK}" opacity="{opacity}"' + (f' stroke-dasharray="{dashes}"/>' if dashes else "/>")


def box(x: float, y: float, width: float, height: float, colour: str, about: str = "") -> str:
    """A filled rectangle; `about` is shown where a pointer rests on it."""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"'
    return f"{shape}><title>{escape(about)}</title></rect>" if about else shape + "/>"
