"""Less memory per step: micro-batches give the same step, bfloat16 a near one, checkpointed layers the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from freshet.core.method import LocalRule
from freshet.data import from_arrays
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, method_options
from freshet.models.registry import build
from freshet.training import trainer as training
from freshet.training.batches import FederatedData, batch_length, split_batch
from freshet.training.device_eval import DeviceEvaluation
from freshet.training.network import FlatModel, enable_checkpointing, initial_weights, with_autocast
from freshet.training.options import TrainingOptions
from freshet.training.task import TASKS, Task
from freshet.training.trainer import Trainer, TripInput
from tests.training.test_trainer import SEED, fresh_model, fresh_rule, mlp, same, trainer, trip_input, with_batch_norm

#: How far a step in parts may be from the whole one: rounding of float32.
ROUNDING = 3e-6


def train(given: Trainer, work: TripInput) -> np.ndarray:
    return given.train(work).weights


# ---- micro-batches


@pytest.mark.parametrize("size", [1, 3, 8, 50])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimiser": "adam"}, {"clip": 0.1}])
def test_micro_batches_give_the_step_of_the_whole_batch(options: dict[str, Any], size: int) -> None:
    """Batches of 8, the last of 5 samples: parts of unequal size, too."""
    whole = train(trainer(**options), trip_input(lr=0.01))
    parts = train(trainer(**options, micro_batch_size=size), trip_input(lr=0.01))
    assert np.abs(parts - whole).max() < (3e-4 if "optimiser" in options else ROUNDING)  # Adam divides by small numbers
    assert np.abs(whole - initial_weights(mlp, SEED)).max() > 1e-3


@pytest.mark.parametrize("name", ["fedprox", "ditto"])
def test_the_terms_of_a_rule_count_once_per_step(name: str) -> None:
    work = trip_input(rule=class_and_preset(name)[0].rule(method_options(name, {})))
    whole, parts = trainer().train(work), trainer(micro_batch_size=3).train(work)
    assert np.abs(parts.weights - whole.weights).max() < ROUNDING
    assert parts.steps == whole.steps
    assert parts.memory.keys() == whole.memory.keys()
    for key, value in whole.memory.items():
        assert np.abs(np.asarray(parts.memory[key]) - np.asarray(value)).max() < 10 * ROUNDING


def test_a_merge_judges_by_the_whole_batch() -> None:
    work = trip_input(slot=2, fresh=fresh_model(), rule=fresh_rule())
    whole, parts = trainer().train(work), trainer(micro_batch_size=3).train(work)
    assert np.abs(parts.weights - whole.weights).max() < ROUNDING
    for name, value in whole.merges[0].numbers.items():
        assert parts.merges[0].numbers[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_evaluation_after_local_steps_is_the_same() -> None:
    work = DeviceEvaluation(initial_weights(mlp, SEED), 1, [0, 1], steps=4, lr=0.1)
    whole, parts = trainer().evaluate_devices(work), trainer(micro_batch_size=3).evaluate_devices(work)
    assert np.abs(parts.loss - whole.loss).max() < ROUNDING


def test_a_paused_trip_and_the_same_input_give_the_same_bits() -> None:
    work = trip_input(slot=2, fresh=fresh_model(), rule=fresh_rule())
    assert same(trainer(micro_batch_size=3).train(work), trainer(micro_batch_size=3).train(work))


def test_the_reported_loss_is_that_of_the_whole_batch() -> None:
    from freshet.core.messages import LOSS_DECAY

    def report(size: int) -> float:
        work = trip_input(lr=0.01)
        work = work._replace(assignment=work.assignment._replace(instruction={LOSS_DECAY: 0.3}))
        return trainer(micro_batch_size=size).train(work).report["loss"]

    assert report(3) == pytest.approx(report(0), rel=1e-6)


class Tagger(nn.Module):
    """Scores for each of 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).view(-1, 4, 5)


def test_parts_are_weighted_by_their_tokens_that_count() -> None:
    """A part in which no token counts adds nothing. A mean of means would be wrong here."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 6)).astype(np.float32), rng.integers(0, 5, (12, 4))
    y[rng.random((12, 4)) < 0.5] = -100
    y[:4] = -100
    dataset = from_arrays("tokens", (x, y), (x, y), classes=5)
    data = FederatedData.of(dataset, [np.arange(12)])

    def weights(size: int) -> np.ndarray:
        options = TrainingOptions(epochs=1, batch_size=12, task="tokens", micro_batch_size=size)
        return train(Trainer(Tagger, data, options, SEED), trip_input(Tagger, lr=1.0))

    assert np.abs(weights(1) - weights(0)).max() < ROUNDING
    assert np.abs(weights(5) - weights(0)).max() < ROUNDING


def test_a_batch_in_which_no_token_counts_changes_nothing() -> None:
    x, y = np.ones((3, 6), np.float32), np.full((3, 4), -100)
    y[2] = 1
    data = FederatedData.of(from_arrays("tokens", (x, y), (x, y), classes=5), [np.arange(2)])
    start = initial_weights(Tagger, SEED)
    for size in (0, 1):
        options = TrainingOptions(epochs=1, batch_size=2, task="tokens", micro_batch_size=size)
        assert np.array_equal(train(Trainer(Tagger, data, options, SEED), trip_input(Tagger, weights=start)), start)


def test_a_rule_with_a_loss_of_its_own_counts_samples() -> None:
    class Square(LocalRule):
        def loss(self, local: Any, x: Any, y: Any) -> Tensor:
            return (local.model(x) ** 2).mean()

    whole = train(trainer(), trip_input(rule=Square()))
    assert np.abs(train(trainer(micro_batch_size=3), trip_input(rule=Square())) - whole).max() < ROUNDING


def test_a_custom_loss_counts_samples() -> None:
    from tests.training.test_trainer import federated_data

    def to_one(output: Tensor, y: Tensor) -> Tensor:
        return mse_loss(output, torch.ones_like(output))

    def weights(size: int) -> np.ndarray:
        options = TrainingOptions(epochs=3, batch_size=8, task="custom", micro_batch_size=size)
        return train(Trainer(mlp, federated_data(), options, SEED, Task(to_one)), trip_input())

    assert np.abs(weights(3) - weights(0)).max() < ROUNDING


def test_a_batch_of_any_form_is_divided_by_samples() -> None:
    x = {
        "ids": torch.arange(10).view(5, 2),
        "pair": (torch.arange(5), ("a", "b", "c", "d", "e")),
        "boxes": tuple({"box": torch.full((i,), i)} for i in range(5)),
        "scale": torch.tensor(2.0),
    }
    parts = list(split_batch(x, torch.arange(5), 2))
    assert [batch_length(y) for _, y in parts] == [2, 2, 1]
    second, y = parts[1]
    assert second["ids"].tolist() == [[4, 5], [6, 7]] and y.tolist() == [2, 3]
    assert second["pair"][0].tolist() == [2, 3] and second["pair"][1] == ("c", "d")
    assert [box["box"].tolist() for box in second["boxes"]] == [[2, 2], [3, 3, 3]]
    assert second["scale"] == 2.0


def test_a_batch_without_one_row_per_sample_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"training\.micro_batch_size: cannot divide a batch of 5 samples in which"):
        list(split_batch({"x": torch.zeros(5, 2), "order": torch.zeros(1, 7)}, torch.arange(5), 2))


def test_batch_norm_and_a_part_of_one_sample_give_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"training\.micro_batch_size: 7 leaves a part of one sample, but BatchNorm"):
        trainer(with_batch_norm, micro_batch_size=7).train(trip_input(with_batch_norm))


# ---- bfloat16


def test_the_network_computes_in_bfloat16_and_everything_else_is_float32() -> None:
    seen: list[torch.dtype] = []

    def watched() -> nn.Module:
        module = mlp()
        module[2].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
        return module

    given = trainer(watched, precision="bf16")
    whole, half = train(trainer(), trip_input()), train(given, trip_input(watched))
    assert set(seen) == {torch.bfloat16}
    assert half.dtype == np.float32 and given.flat.gradient.dtype is torch.float32
    assert 1e-6 < np.abs(half - whole).max() < 0.02
    seen.clear()
    score, exact = given.evaluate(half), trainer().evaluate(half)
    assert set(seen) == {torch.bfloat16}
    assert score.loss == pytest.approx(exact.loss, rel=0.02) and score.loss != exact.loss


def test_bfloat16_gives_the_same_bits_again_and_works_with_micro_batches() -> None:
    work = trip_input(slot=2, fresh=fresh_model(), rule=fresh_rule())
    assert same(trainer(precision="bf16").train(work), trainer(precision="bf16").train(work))
    parts = train(trainer(precision="bf16", micro_batch_size=3), trip_input())
    assert np.abs(parts - train(trainer(precision="bf16"), trip_input())).max() < 0.02


IMAGE, TEXT = (3, 32, 32), (12,)
SHAPES = dict.fromkeys(("lenet5", "cnn", "resnet20", "vgg11", "mlp"), IMAGE) | dict.fromkeys(
    ("textcnn", "charlstm"), TEXT
)


@pytest.mark.parametrize("name", SHAPES)
def test_built_in_networks_compute_in_bfloat16(name: str) -> None:
    text = {"vocabulary": 30, "pad_id": 0} if SHAPES[name] == TEXT else {}
    module = with_autocast(build(name, input_shape=SHAPES[name], classes=4, **text), "cpu")
    x = torch.randint(30, (3, *TEXT)) if text else torch.randn(3, *IMAGE)
    output = module(x)
    output.sum().backward()
    assert output.dtype is torch.float32
    assert all(parameter.grad.dtype is torch.float32 for parameter in module.parameters() if parameter.grad is not None)


def test_outputs_of_any_form_are_float32_again() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            z = self.layer(x)
            return {"logits": z, "more": (z, [z]), "name": "z"}

    output = with_autocast(Both(), "cpu")(torch.ones(1, 2))
    assert output["logits"].dtype is output["more"][0].dtype is output["more"][1][0].dtype is torch.float32
    assert output["name"] == "z"


def test_moon_compares_features_that_bfloat16_gave() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 1, 28, 28)).astype(np.float32), rng.integers(0, 3, 12)
    data = FederatedData.of(from_arrays("images", (x, y), (x, y), classes=3), [np.arange(12)])

    def lenet() -> nn.Module:
        return build("lenet5", input_shape=(1, 28, 28), classes=3)

    rule = class_and_preset("moon")[0].rule(method_options("moon", {"mu": 1.0}))
    work = trip_input(lenet, rule=rule, lr=0.01, memory={"previous": initial_weights(lenet, SEED + 1)})

    def weights(**options: Any) -> np.ndarray:
        return train(Trainer(lenet, data, TrainingOptions(batch_size=6, **options), SEED), work)

    whole = weights()
    assert 0 < np.abs(weights(precision="bf16") - whole).max() < 0.01
    assert np.abs(weights(micro_batch_size=4) - whole).max() < ROUNDING


def test_a_gpu_without_bfloat16_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match=r"training\.precision: this GPU cannot compute in bfloat16; use float32"):
        training.check_precision("bf16", "cuda")
    training.check_precision("bf16", "cpu")
    training.check_precision("float32", "cuda")


# ---- checkpointed layers


class Deep(nn.Module):
    """A network that offers checkpointing as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(6, 7), nn.Linear(7, 3), 0
        self.settings: dict[str, Any] | None = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.settings = gradient_checkpointing_kwargs

    def _inner(self, x: Tensor) -> Tensor:
        self.again += 1
        return torch.dropout(torch.relu(self.first(x)), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.settings is None:
            return self.last(self._inner(x))
        from torch.utils.checkpoint import checkpoint

        return self.last(checkpoint(self._inner, x, **self.settings))


def test_checkpointed_layers_are_computed_twice_and_give_the_same_bits() -> None:
    kept, again = trainer(Deep), trainer(Deep, gradient_checkpointing=True)
    assert train(kept, trip_input(Deep)).tobytes() == train(again, trip_input(Deep)).tobytes()
    assert again.flat.module.again == 2 * kept.flat.module.again


def test_a_model_that_offers_no_checkpointing_gives_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"training\.gradient_checkpointing: Sequential does not offer it"):
        trainer(mlp, gradient_checkpointing=True)

    class Refusing(nn.Linear):
        def gradient_checkpointing_enable(self, **given: Any) -> None:
            raise ValueError("Refusing does not support gradient checkpointing.")

    with pytest.raises(ConfigError, match=r"Refusing refuses it: Refusing does not support"):
        enable_checkpointing(Refusing(2, 2))


# ---- Hugging Face models


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_a_hugging_face_model_trains_alike_with_less_memory(kind: str) -> None:
    """Sentences of different lengths: each part has another number of tokens that count."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    from tests.training import test_huggingface as hf

    model, data = {
        "bert": lambda: (hf.bert(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0), hf.classification()),
        "gpt2": lambda: (hf.gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0), hf.language()),
        "vit": lambda: (hf.vit(), hf.pictures()),
    }[kind]()

    def weights(**options: Any) -> np.ndarray:
        chosen = {"optimiser": "sgd", "lr": 0.1, "epochs": 1, "batch_size": 16} | options
        made = hf.federation(model, data, training=chosen)
        t = made.assembly.setup().trainer()
        assignment = trip_input(mlp).assignment._replace(weights=made.assembly.initial.weights, epochs=1)
        return train(t, TripInput(assignment, (), (), LocalRule(), {}))

    whole = weights()
    assert np.abs(weights(micro_batch_size=3) - whole).max() < 1e-5
    assert weights(gradient_checkpointing=True).tobytes() == whole.tobytes()
    half = weights(precision="bf16", micro_batch_size=3, gradient_checkpointing=True)
    assert 0 < np.abs(half - whole).max() < 0.02


def test_an_adapter_with_a_frozen_base_learns_under_checkpointing() -> None:
    pytest.importorskip("peft", reason="needs the extra hf")
    from tests.training import test_huggingface as hf

    def gradients(checkpointing: bool) -> Tensor:
        model = hf.lora(hf.gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0), "CAUSAL_LM", ["c_attn"])
        if checkpointing:
            enable_checkpointing(model)
        flat = FlatModel(model)
        ids = torch.arange(6, 12).view(1, -1)
        flat.collect(TASKS["huggingface"].batch_loss(model.train(), {"input_ids": ids, "labels": ids}, None))
        return flat.gradient

    assert gradients(True).abs().max() > 0
    assert torch.equal(gradients(True), gradients(False))


# ---- several GPUs, with fakes


def test_workers_are_dealt_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for place in range(5):
        training.deal_gpu("cuda", place)
    assert chosen == [0, 1, 2, 0, 1]
    training.deal_gpu("cpu", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    training.deal_gpu("cuda", 1)
    assert chosen == [0, 1, 2, 0, 1]


def test_a_trainer_uses_the_gpu_of_its_worker_and_alone_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.compute.helpers import make_setup

    places: list[tuple[str, int]] = []
    monkeypatch.setattr(training, "deal_gpu", lambda device, place: places.append((device, place)))
    setup = make_setup()
    setup.trainer()
    assert places == []
    setup.trainer(2)
    assert places == [(training.pick_device("auto"), 2)]
