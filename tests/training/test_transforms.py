"""Random transforms of a user's own Dataset: drawn anew in each epoch, from the trip's streams and nothing else."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from freshet import DataError, Federation
from freshet.data.adapters import LazyRows, own_draws
from freshet.data.samples import Records

RUN = {"per_round": 3, "period": 4.0, "in_flight": 4, "executor": "serial"}
DRAWS = {
    "torch": lambda: torch.randn(6),
    "numpy": lambda: torch.from_numpy(np.random.standard_normal(6)).float(),
    "python": lambda: torch.tensor([random.gauss(0.0, 1.0) for _ in range(6)]),
}


class Noisy(Dataset):
    """Samples with noise from one of the global generators. ``seen`` holds what was read of each sample."""

    def __init__(self, kind: str = "torch", form: str = "pair") -> None:
        rng = np.random.default_rng(0)
        self.kind, self.form, self.seen = kind, form, {}
        self.labels = rng.integers(0, 3, 48)
        self.x = torch.from_numpy(rng.standard_normal((48, 6)) + self.labels[:, None]).float()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        x = self.x[row] + 0.3 * DRAWS[self.kind]()
        self.seen.setdefault(row, []).append(x.numpy().tobytes())
        label = int(self.labels[row])
        return (x, label) if self.form == "pair" else {"x": x, "label": label}


def clean() -> tuple[np.ndarray, np.ndarray]:
    source = Noisy()
    return source.x.numpy(), source.labels


class OneInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def federation(train, **changes) -> Federation:
    test = clean() if train.form == "pair" else [{"x": x, "label": int(y)} for x, y in zip(*clean(), strict=True)]
    values = {"train": train, "test": test, "devices": 4, "run": RUN, "fleet": {"fastest": 2.0}, "method": "fedavg"}
    return Federation(OneInput, **(values | {"training": {"epochs": 3}} | changes))


@pytest.mark.parametrize("form", ["pair", "dict"])
@pytest.mark.parametrize("kind", DRAWS)
def test_each_epoch_draws_anew(tmp_path, kind, form):
    train = Noisy(kind, form)
    built = federation(train)
    assert isinstance(built.dataset.x_train, LazyRows if form == "pair" else Records)
    train.seen.clear()
    trips = built.run(20, out=tmp_path / "a").summary["uploads"]
    reads = [read for row in train.seen.values() for read in row]
    assert trips > 4 and len(reads) >= trips * 12 * 3
    assert len(set(reads)) > 0.9 * len(reads)


@pytest.mark.parametrize("form", ["pair", "dict"])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_run_does_not_depend_on_the_global_generators(tmp_path, kind, form):
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        federated = federation(Noisy(kind, form))
        results.append(federated.run(12, out=tmp_path / str(seed)).weights)
    assert np.array_equal(*results)


def test_a_run_leaves_the_global_generators_alone(tmp_path):
    states = [torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()]
    federation(Noisy("python")).run(8, out=tmp_path / "a")
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()


def test_workers_draw_the_same(tmp_path):
    def weights(name: str, run: dict) -> np.ndarray:
        return federation(Noisy("numpy"), run=RUN | run).run(12, out=tmp_path / name).weights

    assert np.array_equal(weights("a", {}), weights("b", {"executor": "processes", "workers": 2}))


def test_a_resumed_run_draws_the_same(tmp_path):
    every = {"run": RUN | {"keep_checkpoint": True}, "method": "fedasmu"}
    whole = federation(Noisy("numpy"), **every).run(16, out=tmp_path / "whole").weights
    federation(Noisy("numpy"), **every).run(7, out=tmp_path / "part")
    assert np.array_equal(federation(Noisy("numpy"), **every).resume(tmp_path / "part", until=16).weights, whole)


def test_random_test_samples_are_the_same_at_every_evaluation(tmp_path):
    test = Noisy("python")
    built = federation(Noisy(), test=test)
    built.run(1, out=tmp_path / "a")
    test.seen.clear()
    trainer = built.assembly.setup().trainer()
    scores = [trainer.evaluate(built.assembly.initial.weights) for _ in range(2)]
    assert scores[0] == scores[1]


def test_a_dataset_without_draws_is_read_once():
    class Plain(Noisy):
        def __getitem__(self, row: int):
            return self.x[row], int(self.labels[row])

    assert isinstance(federation(Plain()).dataset.x_train, np.ndarray)


def test_token_ids_that_are_drawn_need_a_vocabulary():
    class Tokens(Noisy):
        def __getitem__(self, row: int):
            return torch.randint(0, 9, (5,)), int(self.labels[row])

    ids = np.zeros((48, 5), np.int64)
    with pytest.raises(DataError, match=r"drawn anew at each read.*set data.lazy = true and data.vocabulary"):
        federation(Tokens(), test=(ids, clean()[1]))


def test_own_draws_restores_all_generators():
    before = [random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()]
    with own_draws(3):
        first = random.random(), np.random.random(), torch.rand(1).item()
    with own_draws(3):
        assert first == (random.random(), np.random.random(), torch.rand(1).item())
    assert before[0] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert torch.equal(before[2], torch.get_rng_state())
