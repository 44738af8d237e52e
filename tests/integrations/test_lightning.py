"""A LightningModule trains by Lightning's Trainer: the same bits as the built-in loop, merges included."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freshet import ConfigError
from freshet.core.method import LocalRule
from freshet.integrations.lightning import LightningTrainer
from tests.integrations.helpers import METHODS, UNTIL, build, events, run_on_one_and_two
from tests.training.test_own_loop import STEPS, with_loop
from tests.training.test_trainer import fresh_model, fresh_rule, mlp, trainer, trip_input

lightning = pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'freshet-fl[lightning]'")


class Net(lightning.LightningModule):
    def __init__(self, lr: float = 9.0, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


@pytest.mark.parametrize("method", METHODS)
def test_three_methods_on_one_process_and_on_two_workers(method, pool, tmp_path):
    result = run_on_one_and_two(Net, LightningTrainer(), method, pool, tmp_path)
    assert any("train_loss" in row for row in events(result) if row["kind"] == "upload")
    assert any(row["kind"] == "merge" for row in events(result)) == (method == "fedasmu")
    builtin = build(Net, None, method).run(UNTIL, out=tmp_path / "builtin")
    assert builtin.summary["weights_sha256"] == result.summary["weights_sha256"], "SGD in Lightning is the same SGD"


def test_manual_optimisation_with_two_optimisers_and_lightnings_own_options(tmp_path):
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, _: int) -> None:
            for optimiser in self.optimizers():
                optimiser.zero_grad()
                self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
                optimiser.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.layers[place].parameters(), lr=0.01) for place in (0, 3)]

    seen = []

    class Watch(lightning.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.append((trainer.current_epoch, trainer.global_step))

    loop = LightningTrainer(8, callbacks=Watch(), limit_train_batches=1.0)
    assert build(Two, loop, "fedasmu").run(30, out=tmp_path / "run").summary["aggregations"] >= 2
    assert seen and all(epoch == 3 for epoch, _ in seen)


def test_a_hurried_fit_stops_at_the_end_of_its_epoch():
    class Hurry(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, place: int) -> None:
            if trainer.global_step == STEPS + 2:
                trip.hurry()

    one = with_loop(LightningTrainer(8, callbacks=[Hurry()]), Net)
    trip = one.begin(trip_input(Net).assignment, (), LocalRule(), {})
    assert trip.advance(lambda: True) and trip.finish().steps == 2 * STEPS


def test_a_fit_that_is_ended_for_its_merges_leaves_no_trace():
    work = trip_input(Net, slot=2, rule=fresh_rule(), fresh=fresh_model(Net), merge_only=True)
    level = logging.getLogger("lightning.pytorch").level
    mine = with_loop(LightningTrainer(), Net).train(work)
    assert mine.merges == trainer(Net, fast=False).train(work).merges
    assert logging.getLogger("lightning.pytorch").level == level


def test_another_module_is_one_sentence():
    with pytest.raises(ConfigError, match="model: LightningTrainer needs a LightningModule, not Sequential"):
        with_loop(LightningTrainer(), mlp).train(trip_input())
