"""What a method says of itself, in one place: names and marks, what the tuner may change, what a report draws.

Plain data; the tuner and the report read it and know no method by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from freshet.errors import ConfigError

Kind = Literal["async", "sync"]
Replaces = Literal["arrival", "aggregation"]


class Remark(NamedTuple):
    """What a reader of results must know about a method: a short mark beside its name, and the sentence behind it."""

    mark: str
    text: str


@dataclass(frozen=True)
class Range:
    """What an option may be when it is tuned: from ``low`` to ``high``, both included; ``log`` where factors matter."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def clip(self, value: float) -> float:
        """The nearest value inside."""
        return min(self.high, max(self.low, value))

    def within(self, in_flight: int) -> "Range":
        """What is left of it when so many devices train at once."""
        return self


class UploadCount(Range):
    """Of an option that counts the uploads to wait for: never more than devices train at once."""

    def within(self, in_flight: int) -> Range:
        return Range(min(self.low, in_flight), min(self.high, in_flight), self.log, self.whole)


class Curve(NamedTuple):
    """A number in the method's events that is worth a curve over time, one per device (the event names it)."""

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
    #: True when the original formulas are not accessible; shown in every table.
    reconstructed: bool = False
    #: Shown with the method's results, for example when a part of the paper is left out.
    remark: Remark | None = None
    #: When a finished device is replaced under the constant-concurrency trigger.
    replaces: Replaces = "arrival"
    #: What ``freshet tune`` may change beside the learning rate: option to range.
    space: Mapping[str, Range] = field(default_factory=dict)
    #: The same for variants whose options are useful in other ranges: variant to option to range.
    spaces: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    #: What the report draws over time.
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        for key, allowed in (("kind", get_args(Kind)), ("replaces", get_args(Replaces))):
            if getattr(self, key) not in allowed:
                problem = f"must be {' or '.join(map(repr, allowed))}, but {getattr(self, key)!r} was given"
                raise ConfigError(f"{self.name}.about.{key}", problem)

    @property
    def names(self) -> tuple[str, ...]:
        """The method's own name and those of its variants."""
        return (self.name, *self.variants)

    def marks(self) -> dict[str, str]:
        """What must be said of the method wherever its results stand: marks, and the sentence behind each."""
        marks = {"R": "reconstructed: the original formulas are not accessible"} if self.reconstructed else {}
        return marks | ({self.remark.mark: self.remark.text} if self.remark else {})
