"""Who watches a run."""

from collections.abc import Sequence

from freshet.core.events import Record
from freshet.errors import ConfigError


class Observer:
    """Something that watches a run (a progress bar, a tracker). Override what you need.

    Any of it may raise ``freshet.Stop`` to end the run before its next event.
    """

    def on_event(self, event: Record) -> None:
        """An event has been written."""

    def on_metrics(self, row: Record) -> None:
        """The global model has been tested."""

    def on_message(self, message: str) -> None:
        """Something that a person should know."""

    def on_progress(self, time: float) -> None:
        """Virtual time has moved on."""

    def on_end(self, summary: Record) -> None:
        """The run is over."""


_CALLED = [name for name in vars(Observer) if name.startswith("on_")]


def checked(observers: Sequence[Observer]) -> list[Observer]:
    """These observers; raises one sentence unless each has all that a run calls."""
    if not hasattr(observers, "__iter__"):
        raise ConfigError("observers", f"must be a list, as in observers=[Mine()], but {_brief(observers)} was given")
    found = list(observers)
    for observer in found:
        if isinstance(observer, type):
            raise ConfigError("observers", f"{observer.__name__} is a class; give an object, {observer.__name__}()")
        lacks = [name for name in _CALLED if not callable(getattr(observer, name, None))]
        if lacks:
            problem = f"{_brief(observer)} has no {lacks[0]}; derive its class from freshet.Observer"
            raise ConfigError("observers", problem)
    return found


def _brief(value: object) -> str:
    return " ".join(repr(value).split())[:80]
