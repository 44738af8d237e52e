"""The colours of all figures. A method has the same colour on paper and on the page."""

from collections.abc import Sequence

Theme = dict[str, str | list[str]]
#: Both themes of the page. ``c``: colours of methods and classes, as distinct for colour-blind readers as twelve can
#: be; ``ramp`` and ``scale``: from low to high, in one hue and in several; single names: text, lines, surfaces.
THEMES: dict[str, Theme] = {
    "light": {
        "c": [
            "#0072b2", "#d55e00", "#009e73", "#b4578c", "#c98a00", "#4aa5dc",
            "#6a51a3", "#5f6b7a", "#8c4a2f", "#7d8c00", "#006d77", "#c2185b",
        ],
        "ramp": ["#f1f6f9", "#c5dfec", "#7fb8d3", "#2f86ad", "#0b4f71"],
        "scale": ["#5c2d91", "#3b6fb6", "#1f9e8f", "#6cc24a", "#e0c400"],
        "ink": "#16202b", "soft": "#45525f", "muted": "#6b7885",
        "paper": "#ffffff", "ground": "#f5f7f9", "hover": "#f0f4f7", "fleet": "#f7f9fb",
        "line": "#e2e7ec", "grid": "#e9edf1", "axis": "#cfd6dd",
        "down": "#8fbbdd", "train": "#dbe1e8", "retrain": "#b9c5d2", "fresh": "#f29d38", "bad": "#c8203a",
        "accent": "#0b6e99", "accent-soft": "#e3f1f7", "mark": "#fff5d9", "warn": "#9a4b00", "warn-soft": "#fdefdf",
    },
    "dark": {
        "c": [
            "#4ca8e8", "#f08a4b", "#2fc79a", "#e39bc4", "#f2c14e", "#9bd8ff",
            "#b09be8", "#a3aebd", "#d08b6c", "#c3cf4a", "#4fc3c9", "#ff6f9f",
        ],
        "ramp": ["#1a2530", "#1f4a60", "#2a7698", "#5ab0d6", "#bfe7fb"],
        "scale": ["#8a63e0", "#5b8bd9", "#2fb3a8", "#7ad65f", "#fde725"],
        "ink": "#e8eef4", "soft": "#b9c5d0", "muted": "#8b99a7",
        "paper": "#161e27", "ground": "#0e141b", "hover": "#1c2631", "fleet": "#131a22",
        "line": "#283340", "grid": "#232d38", "axis": "#3a4654",
        "down": "#3f7299", "train": "#33404d", "retrain": "#4d5e70", "fresh": "#f0a348", "bad": "#ff6b7d",
        "accent": "#5ab9e4", "accent-soft": "#14303f", "mark": "#3a3216", "warn": "#f3b271", "warn-soft": "#37260f",
    },
}  # fmt: skip
#: For figures on white: colours of lines and bars, shades from low to high, and greys.
LIGHT, RAMP = tuple(THEMES["light"]["c"]), tuple(THEMES["light"]["ramp"])
INK, MUTED, GRID = (str(THEMES["light"][name]) for name in ("ink", "muted", "grid"))
COLOURS = len(LIGHT)
#: Order of the colours: the twelve methods of the paper's table, then others, which reuse the colours with a dash. A
#: method that is not listed takes a free colour.
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
    "ca2fl",
    "fadas",
    "scaffold",
    "fedopt",
    "fednova",
    "ditto",
    "fedrep",
    "ace",
    "asyncfeded",
    "fedfa",
    "fedstaleweight",
    "fedat",
    "fedcompass",
    "pisces",
    "safa",
    "fedac",
    "masfl",
    "fedexp",
    "fedacg",
    "mifa",
)
DASHES = ("solid", "dash", "dot")


def styles(methods: Sequence[str]) -> list[int]:
    """A style number per line: its remainder by ``COLOURS`` is the colour, its quotient the dash."""
    found: list[int | None] = []
    for method in methods:
        own = ORDER.index(method) if method in ORDER else None
        found.append(None if own in found else own)
    free = (number for number in range(COLOURS * (len(methods) + 1)) if number not in found)
    return [next(free) if style is None else style for style in found]


def dash(style: int) -> str:
    return DASHES[style // COLOURS % len(DASHES)]


def paint(style: int) -> str:
    """The colour of a style on white."""
    return LIGHT[style % COLOURS]


def variables() -> str:
    """The single colours of both themes as CSS variables."""
    selectors = {":root": THEMES["light"], ':root[data-theme="dark"]': THEMES["dark"]}
    single = {
        selector: " ".join(f"--{name}: {colour};" for name, colour in theme.items() if isinstance(colour, str))
        for selector, theme in selectors.items()
    }
    return "\n".join(f"{selector} {{ {rules} }}" for selector, rules in single.items())
