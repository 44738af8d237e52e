"""What one local training gives."""

from typing import NamedTuple

from freshet.core.messages import Assignment, Number, Upload, make_upload
from freshet.core.method import Memory
from freshet.core.vectors import Vector


class Outcome(NamedTuple):
    """The trained model, the steps taken, the rule's report, its merge's numbers, vectors to send with the model, and
    what the device now remembers."""

    weights: Vector
    steps: int
    report: dict[str, Number]
    merged: dict[str, Number]
    vectors: dict[str, Vector]
    memory: Memory
    diverged: bool = False
    #: Bytes of the model where it is a difference in fewer bytes (``core/links.py``).
    packed: int = 0
    #: Whether it had diverged when it merged (``diverged``: at its end).
    lost_at_merge: bool = False

    def upload(self, assignment: Assignment) -> Upload:
        """What goes up; the memory stays with the device."""
        weights, steps, report, merged, vectors, _, _, packed, _ = self
        return make_upload((*assignment[:3], weights, steps, report, merged, vectors, packed))


class Score(NamedTuple):
    """A model on the test samples: the task's metrics by name, and the mean loss."""

    metrics: dict[str, float]
    loss: float
