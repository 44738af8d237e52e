"""Against whom a method is held, and how much faster or slower it is.

    time ratio = (time to target) / (time to target of the reference):  1.60 takes 1.6 times as long, 0.50 half as long

A median that is missing because runs never reach the target makes a bound: they took longer than they lasted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.runs.facts import Maybe

#: The reference of each kind where it is among the methods; else the first of its kind.
USUAL = {"async": "fedasmu", "sync": "fedssmu"}


def references(methods: Sequence[str], kinds: Sequence[str], named: Sequence[int] = ()) -> list[int | None]:
    """For each method the place of the one that it is held against; None for a reference.

    Asynchronous methods have their reference and synchronous ones theirs, unless one is named for all. A method that is
    alone of its kind is held against the other kind's reference.
    """
    if not methods:
        return []
    if len(named) == 1:
        return [None if place == named[0] else named[0] for place in range(len(methods))]
    chosen = {kind: _first(methods, kinds, kind) for kind in dict.fromkeys(kinds)}
    chosen |= {kinds[place]: place for place in named}
    lonely = [kind for kind in chosen if list(kinds).count(kind) == 1]
    if len(chosen) == 2 and lonely and not named:
        first, second = chosen
        chosen[second if second in lonely else first] = chosen[first if second in lonely else second]
    return [None if chosen[kind] == place else chosen[kind] for place, kind in enumerate(kinds)]


def _first(methods: Sequence[str], kinds: Sequence[str], kind: str) -> int:
    mine = [place for place, each in enumerate(kinds) if each == kind]
    return next((place for place in mine if methods[place] == USUAL.get(kind)), mine[0])


@dataclass(frozen=True)
class Ratio:
    """Time to target over the reference's: exact (``=``), or a bound (``>``, ``<``) where one never got there."""

    value: float
    bound: str = "="

    def __str__(self) -> str:
        return f"{'' if self.bound == '=' else self.bound}{self.value:.2f}x"


def time_ratio(mine: Maybe, my_least: Maybe, theirs: Maybe, their_least: Maybe) -> Ratio | None:
    """The ratio of two median times; with one missing a bound by what it is at least; with both nothing.

    >>> str(time_ratio(160.0, 600.0, 100.0, 600.0)), str(time_ratio(None, 600.0, 100.0, 600.0))
    ('1.60x', '>6.00x')
    """
    if theirs is not None and mine is not None:
        return Ratio(mine / theirs) if theirs > 0 else None
    if theirs is not None and theirs > 0 and my_least is not None:
        return Ratio(my_least / theirs, ">")
    if mine is not None and their_least:
        return Ratio(mine / their_least, "<")
    return None
