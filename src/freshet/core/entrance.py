"""What an upload has to pass before the method sees it: the gates, the method's own objection, the gate of proportion,
and a defence against poisoned updates where there is one."""

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from freshet.core import gates, saving
from freshet.core.defence import Defence
from freshet.core.events import Noted, Rejected
from freshet.core.messages import Upload
from freshet.core.method import Method, overrides
from freshet.core.proportion import Proportion
from freshet.core.vectors import Vector

if TYPE_CHECKING:
    from freshet.core.server import Flight


class Judgement(NamedTuple):
    """What a defence leaves of an upload (None: nothing yet), why it is refused, and what the log should say."""

    upload: Upload | None
    refusal: Rejected | None = None
    notes: tuple[Noted, ...] = ()


class Entrance:
    """Judges uploads of trips that are in flight. ``gate`` is the factor of the gate of proportion (None: there is
    none), ``sends`` names the vectors that come beside the model."""

    def __init__(self, method: Method, sends: tuple[str, ...], gate: float | None, defence: Defence | None) -> None:
        self.method, self.samples, self.layout, self.sends = method, method.world.samples, method.world.layout, sends
        self.gate = None if gate is None else Proportion(gate, method.world.layout, sends)
        self.defence = defence
        self._objects = overrides(type(method), Method, "objection")

    def refusal(
        self, upload: Upload, device: int, flight: "Flight", base: Vector, fresh: Vector | None
    ) -> Rejected | None:
        """Why an upload for this flight, whose device was given ``base`` and, if it asked and there was one, ``fresh``,
        does not pass the gates, or None. A model that moved by a finite length is finite: only where that cannot be
        said is it looked at once more."""
        gate, layout, trip = self.gate, self.layout, flight.trip
        problem = gates.stranger(upload, device, trip, flight.base, layout.size)
        if problem is not None:
            return Rejected(problem, device, trip)
        moved = [] if gate is None else gate.moved(upload.weights, base, fresh)
        finite = gate is not None and all(map(isfinite, moved))
        problem = gates.problem(upload, flight.fresh, layout, self.sends, finite)
        if problem is None and self._objects:
            problem = self.method.objection(upload, flight)
        if problem is not None:
            return Rejected(problem, device, trip)
        if gate is None:
            return None
        lengths = gate.beside(upload, moved)
        excess = gate.excess(lengths, base, flight.epochs * self.samples.item(device))
        gate.seen(lengths)
        return None if excess is None else Rejected(excess.reason, device, trip, excess.numbers)

    def defended(
        self, defence: Defence, upload: Upload, device: int, flight: "Flight", base: Vector, fresh: Vector | None
    ) -> Judgement:
        """What a defence says of an upload that passed the gates."""
        left, problem, notes = defence.judge(upload, flight, base, fresh)
        return Judgement(left, None if problem is None else Rejected(problem, device, flight.trip), notes)

    def release(self) -> tuple[list[tuple[Upload, "Flight"]], tuple[Noted, ...]]:
        """The round is over: uploads that were held back until now, and what the log should say."""
        return ([], ()) if self.defence is None else self.defence.release()

    def state(self) -> saving.Tree:
        """What it has seen."""
        gate, defence = self.gate, self.defence
        return {
            "gate": {} if gate is None else gate.state(),
            "defence": {} if defence is None else defence.state(),
        }

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        if self.gate is not None:
            self.gate.restore(tree["gate"])
        if self.defence is not None:
            self.defence.restore(tree["defence"])
