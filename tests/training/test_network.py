"""Where a model starts, which parameters are sent, and the module of a result."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

from freshet import ConfigError, Federation, load
from freshet.training.network import FlatModel, as_factory, copy_module
from tests.conftest import linear


def run(model, folder: Path, **given):
    sections = {"fleet": {"devices": 4}, "data": {"train_samples": 200, "test_samples": 100}}
    federation = Federation(model, run={"executor": "serial"}, **(sections | given))
    return federation.run(given.pop("until", 60), out=folder)


def test_a_module_is_copied_and_stays_unchanged(tmp_path):
    module = linear()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = run(module, tmp_path / "run")
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert any(not torch.equal(before[name], value) for name, value in result.module().state_dict().items())
    first = Federation(module, devices=4).assembly.begin().server.weights
    np.testing.assert_array_equal(first[:640], module[1].weight.detach().numpy().ravel())


def test_a_model_may_start_from_a_file(tmp_path):
    module = linear()
    save_file(module.state_dict(), tmp_path / "start.safetensors")
    made = Federation("mlp", devices=4, data="digits")
    save_file(made.factory().state_dict(), tmp_path / "mlp.safetensors")
    again = Federation({"name": "mlp", "start": str(tmp_path / "mlp.safetensors")}, devices=4, data="digits", seed=9)
    first = again.assembly.begin().server.weights
    stored = load_file(tmp_path / "mlp.safetensors")
    entry = again.assembly.layout.entries[0]
    np.testing.assert_array_equal(entry.array(first), stored[entry.name])


@pytest.mark.parametrize("content", [None, b"no tensors", "other", "nan"])
def test_a_start_file_that_does_not_fit_gives_one_sentence(tmp_path, content):
    path = tmp_path / "start.safetensors"
    state = {name: value.clone() for name, value in Federation("mlp", devices=4).factory().state_dict().items()}
    if content == "other":
        save_file({"strange": torch.zeros(3)}, path)
    elif content == "nan":
        save_file({name: value * np.nan for name, value in state.items()}, path)
    elif content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.start") as caught:
        Federation({"name": "mlp", "start": str(path)}, devices=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [3, ["mlp"], b"mlp"])
def test_anything_but_a_model_gives_one_sentence(model):
    with pytest.raises(ConfigError, match="model: must be a module, a function that builds one, or a name"):
        Federation(model, devices=4)


def test_a_class_that_needs_arguments_gives_one_sentence_with_the_remedy():
    remedy = r"model: Linear needs arguments \(missing .*\); give a function without any, such as lambda: Linear\(...\)"
    with pytest.raises(ConfigError, match=remedy):
        as_factory(nn.Linear)
    assert isinstance(as_factory(nn.Identity)(), nn.Identity), "a class without arguments is a factory"


# ---- frozen parameters


class LowRank(nn.Module):
    """A large frozen layer and a small trainable correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 10)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_frozen_parameters_are_not_sent_but_belong_to_the_model(tmp_path, executor):
    federation = Federation(
        LowRank, devices=4, method="fedavg", run={"executor": executor, "workers": 2, "per_round": 4}, seed=5
    )
    result = federation.run(500, out=tmp_path / "run")
    travels = 4 * (64 * 2 + 2 * 10)
    assert federation.assembly.layout.size * 4 == travels
    assert result.summary["bytes_up"] == result.summary["uploads"] * travels
    assert result.summary["bytes_down"] == result.summary["trips"] * travels
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert set(stored) == {"base.weight", "base.bias", "down.weight", "up.weight"}
    module = result.module()
    np.testing.assert_array_equal(module.base.weight.detach().numpy(), stored["base.weight"])
    x, y = federation.dataset.x_test, federation.dataset.y_test
    with torch.no_grad():
        right = (module(torch.from_numpy(np.array(x))).argmax(1).numpy() == y).mean()
    assert right == result.accuracy[-1] > 0.5


# ---- the module of a result


def test_the_module_gives_the_logged_metric_on_raw_inputs(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = np.clip(rng.normal(90, 25, (240, 2, 6, 6)) + 40 * y[:, None, None, None], 0, 255).astype(np.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    federation = Federation(model, (x[:180], y[:180]), (x[180:], y[180:]), devices=4, run={"executor": "serial"})
    result = federation.run(100, out=tmp_path / "run")
    with torch.no_grad():
        said = result.module()(torch.from_numpy(x[180:])).argmax(1).numpy()
    assert (said == y[180:]).mean() == result.accuracy[-1] > 0.8
    from freshet.runs.world import read_world

    world = read_world(tmp_path / "run")
    assert world.mean == pytest.approx(list(federation.dataset.mean))
    assert world.std == pytest.approx(list(federation.dataset.std))


# ---- precision of the start and of frozen parameters


def test_a_bfloat16_file_starts_a_model(tmp_path):
    torch.manual_seed(3)
    weight, bias = torch.randn(10, 64).to(torch.bfloat16), torch.ones(10, dtype=torch.float16)
    save_file({"1.weight": weight, "1.bias": bias}, tmp_path / "half.safetensors")
    federation = Federation(linear(), devices=4).with_settings({"model.start": str(tmp_path / "half.safetensors")})
    start = federation.assembly.initial.weights
    assert np.array_equal(start, torch.cat([weight.float().ravel(), bias.float()]).numpy())


class HalfBase(nn.Module):
    """A frozen bfloat16 layer, and a head that trains."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(64, 32).to(torch.bfloat16).requires_grad_(False)
        self.head, self.kind = nn.Linear(32, 10).to(kind), kind
        self.register_buffer("scale", torch.ones(32, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.base(x.flatten(1).to(torch.bfloat16)).relu() * self.scale
        return self.head(z.to(self.kind)).float()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_frozen_bfloat16_layer_stays_as_it_is(tmp_path, kind, executor):
    torch.manual_seed(0)
    model = HalfBase(kind)
    flat = FlatModel(copy_module(model))
    assert flat.module.base.weight.dtype is torch.bfloat16 and flat.module.head.weight.dtype is torch.float32
    assert flat.module.base.weight.data_ptr() == model.base.weight.data_ptr() and flat.layout.size == 32 * 10 + 10 + 32
    run = {"executor": executor, "workers": 2, "per_round": 4}
    federation = Federation(model, devices=4, method="fedavg", run=run, seed=5)
    result = federation.run(200, out=tmp_path / "run")
    assert result.accuracy[-1] > 0.5 and model.head.weight.dtype is kind
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert np.array_equal(stored["base.weight"], model.base.weight.float().numpy())
    torch.manual_seed(1)
    other = HalfBase(kind)
    kept = other.base.weight.clone()
    module = load(tmp_path / "run", other).module()
    assert torch.equal(module.base.weight, model.base.weight) and torch.equal(other.base.weight, kept)


def test_copies_share_frozen_numbers_only():
    model = LowRank()
    copied = copy_module(model)
    assert copied.base.weight.data_ptr() == model.base.weight.data_ptr() and copied.base.weight is not model.base.weight
    assert copied.down.weight.data_ptr() != model.down.weight.data_ptr()
    FlatModel(copied.double())
    assert model.base.weight.dtype is torch.float32


def test_start_weights_leave_a_shared_base_alone(tmp_path):
    model = LowRank()
    before = model.base.weight.clone()
    save_file({"base.weight": torch.zeros(10, 64)}, tmp_path / "w.safetensors")
    federation = Federation(model, devices=4).with_settings({"model.start": str(tmp_path / "w.safetensors")})
    assert not federation.factory().base.weight.any() and torch.equal(model.base.weight, before)


class WithNorms(nn.Module):
    """A frozen and a trained BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.free, self.head = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        for parameter in self.fixed.parameters():
            parameter.requires_grad = False
        self.fixed.running_mean.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.free(self.fixed(x)))


@pytest.mark.parametrize("method", ["fedavg", "fedasmu"])
def test_running_statistics_of_a_frozen_norm_do_not_move(tmp_path, method):
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((60, 6)).astype(np.float32) + 3.0, rng.integers(0, 3, 60)
    run = {"per_round": 3, "period": 4.0, "in_flight": 4, "executor": "serial"}
    given = {"devices": 4, "run": run, "fleet": {"fastest": 2.0}, "training": {"batch_size": 5}}
    module = Federation(WithNorms, samples, samples, method=method, **given).run(12, out=tmp_path / "a").module()
    assert torch.equal(module.fixed.running_mean, torch.full((6,), 0.25))
    assert torch.equal(module.fixed.running_var, torch.ones(6))
    assert int(module.fixed.num_batches_tracked) == 0
    assert float(module.free.running_mean.abs().sum()) > 1.0
    assert int(module.free.num_batches_tracked) > 0


def test_a_frozen_norm_uses_its_statistics_in_training():
    flat = FlatModel(WithNorms())
    flat.train_mode()
    assert flat.module.free.training and flat.module.head.training
    assert not flat.module.fixed.training
