"""What an upload has to pass before the method sees it: the gates, the method's own objection, the gate of proportion,
and a defence against poisoned updates where there is one."""

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
    """What the method gets of an upload (None: nothing yet), why it is refused, and what the log should say."""

    upload: Upload | None
    refusal: Rejected | None = None
    notes: tuple[Noted, ...] = ()


class Entrance:
    """Judges uploads of trips that are in flight. ``gate`` is the factor of the gate of proportion (None: there is
    none), ``sends`` names the vectors that come beside the model."""

    def __init__(self, method: Method, sends: tuple[str, ...], gate: float | None, defence: Defence | None) -> None:
        self.method, self.world, self.sends = method, method.world, sends
        self.gate = None if gate is None else Proportion(gate, method.world.layout, sends)
        self.defence = defence
        self._objects = overrides(type(method), Method, "objection")

    def judge(self, upload: Upload, device: int, flight: "Flight", base: Vector, fresh: Vector | None) -> Judgement:
        """An upload for this flight, whose device was given ``base`` and, if it asked and there was one, ``fresh``."""
        refusal = self._refusal(upload, device, flight, base, fresh)
        if refusal is not None or self.defence is None:
            return Judgement(upload, refusal)
        left, problem, notes = self.defence.judge(upload, flight, base)
        return Judgement(left, None if problem is None else Rejected(problem, device, flight.trip), notes)

    def _refusal(
        self, upload: Upload, device: int, flight: "Flight", base: Vector, fresh: Vector | None
    ) -> Rejected | None:
        problem = gates.stranger(upload, device, flight.trip)
        if problem is None:
            problem = gates.problem(upload, flight.base, flight.fresh, self.world.layout, self.sends)
        if problem is None and self._objects:
            problem = self.method.objection(upload, flight)
        if problem is not None:
            return Rejected(problem, device, flight.trip)
        if self.gate is None:
            return None
        lengths = self.gate.measure(upload, base, fresh)
        excess = self.gate.excess(lengths, base, flight.epochs * self.world.samples.item(device))
        self.gate.seen(lengths)
        return None if excess is None else Rejected(excess.reason, device, flight.trip, excess.numbers)

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
