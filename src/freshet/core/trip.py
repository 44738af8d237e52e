"""The device's side of one local training, as an explicit state machine on plain data.

    TO_SLOT --ask--> ASKED --answer--> FINISHING --finish--> DONE
       \\___________________finish (no request)____________/

A driver (virtual time or a real network) decides *when* the transitions happen; nothing here knows a clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Where a trip is."""

    TO_SLOT = "to_slot"
    ASKED = "asked"
    FINISHING = "finishing"
    DONE = "done"


class Slot(NamedTuple):
    """At the start of which epoch to ask for the fresh model, and who chose it (meta, q, explore, fixed)."""

    epoch: int
    by: str
    action: int = 0


@dataclass(slots=True)
class DeviceTrip:
    """One local training of one device, from the model it was given to the model it uploads."""

    device: int
    trip: int
    base: int
    age: int
    epochs: int
    lr: float
    slot: Slot | None = None
    fresh: int | None = None
    fresh_age: int | None = None
    phase: Phase = Phase.TO_SLOT

    @property
    def epochs_to_slot(self) -> int:
        """Epochs trained before the request (all of them when the device does not ask)."""
        return self.epochs if self.slot is None else self.slot.epoch - 1

    @property
    def epochs_after_slot(self) -> int:
        return self.epochs - self.epochs_to_slot

    def ask(self) -> None:
        """The device has reached its slot and sends the request."""
        self._move(Phase.TO_SLOT, Phase.ASKED)

    def answer(self, fresh: int | None, age: int | None) -> None:
        """The server has answered: with a newer version, or with nothing newer (None)."""
        if fresh is not None and fresh <= self.base:
            raise ValueError(f"fresh version {fresh} is not newer than base {self.base}")
        self._move(Phase.ASKED, Phase.FINISHING)
        self.fresh, self.fresh_age = fresh, age

    def finish(self) -> None:
        """The last epoch is done."""
        self._move(Phase.TO_SLOT if self.slot is None else Phase.FINISHING, Phase.DONE)

    def _move(self, expected: Phase, to: Phase) -> None:
        if self.phase is not expected:
            raise ValueError(f"trip {self.trip} of device {self.device} is {self.phase}, not {expected}")
        self.phase = to
