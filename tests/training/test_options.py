"""Numbers beyond float32, and modules without numbers, give one sentence."""

import pytest
import torch
from torch import nn

from freshet import ConfigError
from freshet.config import resolve
from freshet.training.network import build_module
from freshet.training.options import MAX_FACTOR, MAX_FLOAT32


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"training": {"lr": 1e300}}, r"^training\.lr: must be at most 3.4e\+38, but 1e\+300 was given"),
        (
            {"training": {"weight_decay": 1e300}},
            r"^training\.weight_decay: must be at most 3.4e\+38, but 1e\+300 was given",
        ),
        (
            {"training": {"lr": 1e20, "optimiser": "adam"}},
            r"^training\.optimiser: only sgd takes a training.lr above 1e",
        ),
        (
            {"training": {"weight_decay": 1e20, "optimiser": "adamw"}},
            r"^training\.weight_decay: must be at most 1e\+15",
        ),
        ({"training": {"nesterov": "yes"}}, r"^training\.nesterov: .*valid boolean, but 'yes' was given"),
    ],
)
def test_a_number_beyond_the_bounds_is_refused(tables, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolve(tables)


@pytest.mark.parametrize(("optimiser", "most"), [("sgd", MAX_FLOAT32), ("adam", MAX_FACTOR), ("adamw", MAX_FACTOR)])
def test_the_largest_numbers_may_diverge_but_do_not_fail(optimiser, most, federate, tmp_path):
    training = {"lr": most, "weight_decay": most, "optimiser": optimiser}
    ended = federate("fedavg", training=training, run={"gate": 1e300}).run(20, out=tmp_path / "run")
    assert ended.summary["status"] in ("finished", "diverged")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4)), r"^model: 0\.weight has no shape yet; run one sample through"),
        (lambda: nn.LazyBatchNorm1d(affine=False), r"^model: running_mean has no shape yet"),
        (on_meta, r"^model: weight is on the meta device and has no numbers; build it on the CPU"),
    ],
)
def test_a_module_without_numbers_is_refused(factory, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_module(factory)
