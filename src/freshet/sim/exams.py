"""Tests of the global model on every device: when they are due, and how their results come together.

They change nothing of a run: no random stream, memory or event of a device depends on them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from freshet.compute.executor import Executor, Future
from freshet.core.server import Server
from freshet.training.device_eval import DeviceScores, Exam, spread
from freshet.training.task import Score


class Wish(Protocol):
    """What a user says about them (the run's options)."""

    @property
    def evaluate_devices(self) -> str | int: ...

    @property
    def personalise(self) -> int: ...


class Tested(NamedTuple):
    """A test of the global model whose devices have been tested, too."""

    score: Score
    plain: DeviceScores
    personal: DeviceScores | None

    def numbers(self) -> dict[str, Any]:
        """The test's own scores, and those of the devices at a glance."""
        found: dict[str, Any] = {**self.score.metrics, "loss": self.score.loss}
        found |= {f"devices_{key}": value for key, value in spread(self.plain.accuracy).items()}
        if self.personal is not None:
            found |= {f"personal_{key}": value for key, value in spread(self.personal.accuracy).items()}
        return found

    def by_device(self) -> dict[str, Any]:
        """Everything, one entry per device."""
        found: dict[str, Any] = {"accuracy": self.plain.accuracy.tolist(), "loss": self.plain.loss.tolist()}
        if self.personal is not None:
            found["personal_accuracy"] = self.personal.accuracy.tolist()
            found["personal_loss"] = self.personal.loss.tolist()
        return found


class Gathered:
    """The results of one test on their way, as one."""

    def __init__(
        self, score: Future[Score], plain: Future[DeviceScores], personal: Sequence[Future[DeviceScores]]
    ) -> None:
        self._score, self._plain, self._personal = score, plain, personal

    def done(self) -> bool:
        return all(part.done() for part in (self._score, self._plain, *self._personal))

    def result(self) -> Tested:
        parts = [part.result() for part in self._personal]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Tested(self._score.result(), self._plain.result(), DeviceScores(*columns) if parts else None)


class Exams:
    """Holds them at every ``every``-th test (0: only at the last), with ``steps`` of local training besides (0: none).

    A version that was examined before, and trained at this learning rate, is not examined again.
    """

    def __init__(self, every: int, steps: int) -> None:
        self.every, self.steps = every, steps
        self._last: tuple[tuple[int, float], Future[DeviceScores], list[Future[DeviceScores]]] | None = None

    @staticmethod
    def asked(wish: Wish) -> "Exams | None":
        """As a run's options say; None for never."""
        when = wish.evaluate_devices
        return None if when == "never" else Exams(when if isinstance(when, int) else 0, wish.personalise)

    def due(self, time: float, eval_every: float, last: bool) -> bool:
        """Whether this test is one of them: told by its time, so that a resumed run agrees. The last always is."""
        return last or (self.every > 0 and round(time / eval_every) % self.every == 0)

    def hold(self, executor: Executor, server: Server, score: Future[Score], time: float) -> Gathered:
        """Hand out the work: one pass for all devices, and local steps of each."""
        version, lr = server.version, server.learning_rate() if self.steps else 0.0
        if self._last is None or self._last[0] != (version, lr):
            weights, devices = server.method.evaluated(server), range(server.world.devices)
            plain = executor.examine(Exam(weights, version, devices), time)
            each = [Exam(weights, version, [device], self.steps, lr) for device in devices if self.steps]
            self._last = ((version, lr), plain, [executor.examine(exam, time) for exam in each])
        return Gathered(score, *self._last[1:])
