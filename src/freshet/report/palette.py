"""One palette: a method has the same colour in every figure, on paper and on the page."""

from collections.abc import Sequence

#: Colours on white, told apart also by the colour-blind as far as twelve can be; the page has them too (theme.js).
LIGHT = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b4578c",
    "#c98a00",
    "#4aa5dc",
    "#6a51a3",
    "#5f6b7a",
    "#8c4a2f",
    "#7d8c00",
    "#006d77",
    "#c2185b",
)
COLOURS = len(LIGHT)
#: Whose colour is whose, in the order of the paper's table; any other method takes one that is free.
ORDER = (
    "fedasmu",
    "fedasync",
    "port",
    "asofed",
    "fedbuff",
    "fedsa",
    "fedssmu",
    "fedavg",
    "fedprox",
    "moon",
    "feddyn",
    "fedlws",
)
DASHES = ("solid", "dash", "dot")


def styles(methods: Sequence[str]) -> list[int]:
    """A number per line: its colour is the remainder by ``COLOURS``, its dash the quotient."""
    found: list[int | None] = []
    for method in methods:
        own = ORDER.index(method) if method in ORDER else None
        found.append(None if own in found else own)
    free = (number for number in range(COLOURS * (len(methods) + 1)) if number not in found)
    return [next(free) if style is None else style for style in found]


def dash(style: int) -> str:
    return DASHES[style // COLOURS % len(DASHES)]


def paint(style: int) -> str:
    """The colour on white."""
    return LIGHT[style % COLOURS]
