"""The header of a method: its names and marks, what the tuner may change, and what a report draws.

It is plain data. The tuner and the report read it and know no method by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from freshet.errors import ConfigError

Kind = Literal["async", "sync"]
Replaces = Literal["arrival", "aggregation"]


class Remark(NamedTuple):
    """What a reader of results must know about a method: a short mark beside its name, and its explanation."""

    mark: str
    text: str


@dataclass(frozen=True)
class Range:
    """The tuning range of an option, from ``low`` to ``high`` inclusive; ``log`` for a logarithmic scale."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def clip(self, value: float) -> float:
        """The nearest value in the range."""
        return min(self.high, max(self.low, value))

    def within(self, in_flight: int) -> "Range":
        """The part of the range that is possible with ``in_flight`` devices training at once."""
        return self


class UploadCount(Range):
    """The range of an option that counts uploads to wait for: at most the devices in flight."""

    def within(self, in_flight: int) -> Range:
        return Range(min(self.low, in_flight), min(self.high, in_flight), self.log, self.whole)


class Curve(NamedTuple):
    """A number in the method's events that a report draws over time, one curve per device."""

    name: str
    #: The kind of event, and the number's key in it.
    event: str
    key: str
    symbol: str
    meaning: str


@dataclass(frozen=True)
class About:
    """The header of a method: ``about = About("mine", "async", "Mine", "Me et al., 2025")``."""

    name: str
    kind: Kind
    title: str
    citation: str
    #: Named presets: ``{"fedasmu-da": {"dynamic_server": False}}``.
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: True if the original formulas are not accessible. Every table shows it.
    reconstructed: bool = False
    #: Shown with the method's results, for example if a part of the paper is left out.
    remark: Remark | None = None
    #: When the concurrency trigger replaces a finished device.
    replaces: Replaces = "arrival"
    #: What ``freshet tune`` may change in addition to the learning rate: ranges by option.
    space: Mapping[str, Range] = field(default_factory=dict)
    #: Other ranges for some variants: ranges by variant and option. None takes an option out of the search.
    spaces: Mapping[str, Mapping[str, Range | None]] = field(default_factory=dict)
    #: What the report draws over time.
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        for key, allowed in (("kind", get_args(Kind)), ("replaces", get_args(Replaces))):
            if getattr(self, key) not in allowed:
                problem = f"must be {' or '.join(map(repr, allowed))}, but {getattr(self, key)!r} was given"
                raise ConfigError(f"{self.name}.about.{key}", problem)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the method and its variants."""
        return (self.name, *self.variants)

    def marks(self) -> dict[str, str]:
        """Marks to print beside the method's results, each with its explanation."""
        marks = {"R": "reconstructed: the original formulas are not accessible"} if self.reconstructed else {}
        return marks | ({self.remark.mark: self.remark.text} if self.remark else {})
