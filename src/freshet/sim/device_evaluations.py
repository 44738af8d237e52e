"""Evaluations of the global model on every device: when they are due, and how their results are combined.

They do not influence a run: no random stream, memory or event of a device depends on them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from freshet.compute.executor import Executor, Future
from freshet.core.server import Server
from freshet.training.device_eval import DeviceEvaluation, DeviceScores, summarise_scores
from freshet.training.task import Score


class EvaluationResult(NamedTuple):
    """The scores of one version: on the test set, on every device and, if asked for, after local training."""

    score: Score
    plain: DeviceScores
    personal: DeviceScores | None

    def numbers(self) -> dict[str, Any]:
        """The scores on the test set, and statistics over the devices."""
        scores: dict[str, Any] = {**self.score.metrics, "loss": self.score.loss}
        scores |= {f"devices_{key}": value for key, value in summarise_scores(self.plain.accuracy).items()}
        if self.personal is not None:
            scores |= {f"personal_{key}": value for key, value in summarise_scores(self.personal.accuracy).items()}
        return scores

    def by_device(self) -> dict[str, Any]:
        """All scores, one entry per device."""
        scores: dict[str, Any] = {"accuracy": self.plain.accuracy.tolist(), "loss": self.plain.loss.tolist()}
        if self.personal is not None:
            scores["personal_accuracy"] = self.personal.accuracy.tolist()
            scores["personal_loss"] = self.personal.loss.tolist()
        return scores


class PendingEvaluation:
    """The pending results of one evaluation as one future."""

    def __init__(
        self, score: Future[Score], plain: Future[DeviceScores], personal: Sequence[Future[DeviceScores]]
    ) -> None:
        self._score, self._plain, self._personal = score, plain, personal

    def done(self) -> bool:
        return all(part.done() for part in (self._score, self._plain, *self._personal))

    def result(self) -> EvaluationResult:
        parts = [part.result() for part in self._personal]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return EvaluationResult(self._score.result(), self._plain.result(), DeviceScores(*columns) if parts else None)


class EvaluationSchedule:
    """Evaluates at every ``every``-th test (0: only at the last), also after ``steps`` of local training (0: not).

    A version is evaluated once per learning rate of the local training.
    """

    def __init__(self, every: int, steps: int) -> None:
        self.every, self.steps = every, steps
        self._last: tuple[tuple[int, float], Future[DeviceScores], list[Future[DeviceScores]]] | None = None

    @staticmethod
    def from_options(evaluate_devices: str | int, personalise: int) -> "EvaluationSchedule | None":
        """Build the schedule from the options of a run. None means never."""
        if evaluate_devices == "never":
            return None
        return EvaluationSchedule(evaluate_devices if isinstance(evaluate_devices, int) else 0, personalise)

    def due(self, time: float, eval_every: float, last: bool) -> bool:
        """Return whether the test at ``time`` evaluates devices. It depends on time alone, so a resumed run agrees."""
        return last or (self.every > 0 and round(time / eval_every) % self.every == 0)

    def start(self, executor: Executor, server: Server, score: Future[Score], time: float) -> PendingEvaluation:
        """Submit one evaluation of all devices, and one per device with local training."""
        version, lr = server.version, server.learning_rate() if self.steps else 0.0
        if self._last is None or self._last[0] != (version, lr):
            weights, devices = server.method.evaluation_model(server), range(server.context.devices)
            plain = executor.evaluate_devices(DeviceEvaluation(weights, version, devices), time)
            personal = [
                DeviceEvaluation(weights, version, [device], self.steps, lr) for device in devices if self.steps
            ]
            self._last = (
                (version, lr),
                plain,
                [executor.evaluate_devices(evaluation, time) for evaluation in personal],
            )
        return PendingEvaluation(score, *self._last[1:])
