"""Settings so small that a run takes a fraction of a second."""

from collections.abc import Sequence

from freshet.experiments.compare import GridObserver
from freshet.experiments.grid import Job, Scenario, UserSettings, expand, parse_entries
from freshet.experiments.store import State

TINY = (
    "model.name=mlp",
    "fleet.devices=4",
    "fleet.fastest=4.0",
    "data.train_samples=120",
    "data.test_samples=60",
    "training.epochs=2",
    "run.until=24",
    "run.eval_every=4.0",
    "run.per_round=2",
    "run.period=4.0",
    "run.executor=serial",
)


def jobs(methods: str = "fedasmu,fedavg", seeds: Sequence[int] = (0, 1), settings: Sequence[str] = ()) -> list[Job]:
    return expand(parse_entries(methods), seeds, UserSettings(settings=[*TINY, *settings]), [Scenario()])


class Diary(GridObserver):
    """Records what a grid did."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, State]] = []
        self.done: list[tuple[str, State, str | None]] = []

    def on_begin(self, job: Job, state: State) -> None:
        self.begun.append((job.key, state))

    def on_done(self, job: Job, state: State, error: str | None) -> None:
        self.done.append((job.key, state, error))
