"""Tasks: losses and metrics against plain formulas, custom functions, and whole runs of every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from freshet import ConfigError, DataError, Federation, Result
from freshet.training.task import IGNORED, TASKS, Task, call

RNG = np.random.default_rng(0)
X = RNG.standard_normal((360, 6)).astype(np.float32)
LINE = (X @ RNG.standard_normal(6) + 0.1 * RNG.standard_normal(360)).astype(np.float32)
TOKENS = RNG.integers(0, 7, (300, 9))


def batches(output: torch.Tensor, y: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(output.split(size), y.split(size), strict=True))


# ---- scores


@pytest.mark.parametrize("size", [4, 7, 30])
def test_scores_do_not_depend_on_the_batch_size(size):
    output, y = torch.randn(30, 5), torch.randint(0, 5, (30,))
    score = TASKS["classification"].score(batches(output, y, size))
    assert score.metrics["accuracy"] == int((output.argmax(1) == y).sum()) / 30
    assert score.loss == pytest.approx(float(cross_entropy(output, y)), rel=1e-6)


def test_binary():
    output, y = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1, 1, 0, 0])
    score = TASKS["binary"].score(batches(output, y, 3))
    assert score.metrics == {"accuracy": 0.5}
    p = torch.sigmoid(output[:, 0])
    expected = -torch.log(torch.where(y == 1, p, 1 - p)).mean()
    assert score.loss == pytest.approx(float(expected), rel=1e-6)


def test_multilabel():
    output = torch.tensor([[1.0, -1.0, 2.0], [-1.0, 1.0, -2.0]])
    y = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    score = TASKS["multilabel"].score(batches(output, y, 1))
    assert score.metrics["accuracy"] == pytest.approx(4 / 6)
    assert score.metrics["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert score.loss == pytest.approx(float(TASKS["multilabel"].mean_loss(output, y)), rel=1e-6)


@pytest.mark.parametrize("sides", [(), (3,)])
def test_regression(sides):
    output, y = torch.randn(20, *(sides or (1,))), torch.randn(20, *sides)
    score = TASKS["regression"].score(batches(output, y, 6))
    off = (output.reshape(y.shape) - y).double()
    assert score.metrics["rmse"] == pytest.approx(float(off.pow(2).mean().sqrt()))
    assert score.metrics["mae"] == pytest.approx(float(off.abs().mean()), rel=1e-5)
    spread = float((y.double() - y.double().mean(0)).pow(2).sum())
    assert score.metrics["r2"] == pytest.approx(1 - float(off.pow(2).sum()) / spread)
    assert score.loss == pytest.approx(float(off.pow(2).mean()), rel=1e-5)


def test_tokens_are_scored_one_by_one_without_padding():
    output, y = torch.randn(8, 5, 4), torch.randint(0, 4, (8, 5))
    y[2:, 3:] = IGNORED
    score = TASKS["tokens"].score(batches(output, y, 3))
    counts = y != IGNORED
    assert score.metrics["accuracy"] == pytest.approx(float((output.argmax(2) == y)[counts].float().mean()))
    assert score.loss == pytest.approx(float(cross_entropy(output[counts], y[counts])), rel=1e-5)


def test_custom_metrics_per_sample_and_over_the_whole_set():
    task = Task(
        loss=lambda o, y: (o - y).pow(2).mean(),
        metrics={"off": lambda o, y: (o - y).abs(), "worst": lambda o, y: (o - y).abs().max()},
        primary="worst",
        direction="min",
    )
    output, y = torch.randn(20), torch.randn(20)
    score = task.score(batches(output, y, 6))
    assert score.metrics["off"] == pytest.approx(float((output - y).abs().mean()), rel=1e-5)
    assert score.metrics["worst"] == pytest.approx(float((output - y).abs().max()))
    assert score.loss == pytest.approx(float((output - y).pow(2).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"primary": "f1"}, r"task\.primary: must be one of a, loss"),
        ({"direction": "up"}, r"task\.direction: must be 'max' or 'min'"),
        ({"metrics": {"time": len}}, r"task\.metrics: 'time' is a reserved name"),
    ],
)
def test_an_invalid_task_gives_one_sentence(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Task(**({"loss": cross_entropy, "metrics": {"a": len}} | given))


def test_the_loss_can_be_the_primary_metric_and_lower_is_better():
    assert (Task(cross_entropy).primary, Task(cross_entropy).direction) == ("loss", "min")


# ---- whole runs


class Next(nn.Module):
    """Predicts the next token from the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))


def federation(model: Any, x: np.ndarray, y: np.ndarray, **given: Any) -> Federation:
    cut = len(x) * 5 // 6
    sections = {"training": {"lr": 0.05}, "run": {"executor": "serial", "eval_every": 50.0}}
    return Federation(model, (x[:cut], y[:cut]), (x[cut:], y[cut:]), devices=6, **(sections | given))


RUNS: dict[str, tuple[Any, np.ndarray, np.ndarray, str]] = {
    "binary": ("mlp", X, (LINE > 0).astype(int), "accuracy"),
    "multilabel": ("mlp", X, np.stack([LINE > 0, X[:, 0] > 0], 1).astype(np.float32), "f1"),
    "regression": (lambda: nn.Linear(6, 1), X, LINE, "rmse"),
    "tokens": (Next, TOKENS, (TOKENS + 1) % 7, "accuracy"),
}


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
@pytest.mark.parametrize("task", RUNS)
def test_every_task_trains_and_is_scored_by_its_own_metric(task, method, tmp_path: Path):
    model, x, y, metric = RUNS[task]
    result = federation(model, x, y, task=task, method=method, training={"lr": 0.2 if task == "tokens" else 0.05}).run(
        300, out=tmp_path / "run"
    )
    first, last = result.values[0], result.values[-1]
    assert result.metric.name == metric
    assert last < 0.5 * first if result.metric.direction == "min" else last > first + 0.2
    assert result.summary[f"final_{metric}"] == last
    assert result.summary[f"best_{metric}"] == (result.values.min() if metric == "rmse" else result.values.max())
    assert set(TASKS[task].metrics) | {"loss"} <= set(result.rows[0])


def test_time_to_target_of_a_metric_to_minimise(tmp_path: Path):
    model, x, y, _ = RUNS["regression"]
    run = {"executor": "serial", "eval_every": 10.0, "target": 1.0}
    result: Result = federation(model, x, y, task="regression", run=run).run(200, out=tmp_path / "run")
    crossed = next(row["time"] for row in result.rows if row["rmse"] <= 1.0)
    assert result.summary["time_to_target"] == crossed == result.time_to(1.0) > 0


def test_a_custom_task_gives_the_same_in_worker_processes(tmp_path: Path):
    own = Task(lambda o, y: (o[:, 0] - y).abs().mean(), {"mae": lambda o, y: (o[:, 0] - y).abs()}, "mae", "min")
    hashes = set()
    for executor in ("serial", "processes"):
        run = {"executor": executor, "workers": 2, "eval_every": 50.0}
        made = federation(lambda: nn.Linear(6, 1), X, LINE, task=own, run=run)
        result = made.run(60, out=tmp_path / executor)
        assert made.config.training.task == "custom"
        hashes.add((result.summary["weights_sha256"], result.values[-1]))
    assert len(hashes) == 1


# ---- what does not fit is one sentence


@pytest.mark.parametrize(
    ("y", "given", "sentence"),
    [
        (LINE, {}, r"training\.task: custom has targets of type float32 .* classification needs .*try 'regression'"),
        ((LINE > 0).astype(int), {"task": "regression"}, "regression needs real numbers; try 'classification'"),
        (LINE, {"task": "binary"}, "binary needs 0 or 1 per sample"),
        (np.stack([LINE > 0, LINE < 9], 1).astype(int), {}, "classification needs .*; try 'multilabel'"),
        (np.stack([LINE > 0, LINE < 9], 1).astype(int) * 2, {}, "classification needs .*; try 'tokens'"),
        (
            LINE,
            {"task": "regression", "data": {"partition": "dirichlet"}},
            r"data\.partition: dirichlet deals by class",
        ),
        (
            LINE,
            {"task": "regression", "model": lambda: nn.Linear(6, 4)},
            r"model: returns \(2, 4\) for targets of shape",
        ),
        (LINE, {"task": Task(lambda o, y: o.sum(1)[:, None] @ y)}, "task: the loss or a metric fails"),
        (
            LINE,
            {"task": Task(lambda o, y: o - y[:, None])},
            r"task: the loss or a metric fails|task\.loss: must return one",
        ),
        (
            (LINE > 0).astype(int) + 1,
            {},
            "returns 2 scores, .* 3 classes; if labels start at 1, give y - 1",
        ),
        (LINE, {"task": "poetry"}, r"training\.task"),
        ((LINE > 0).astype(int), {"run": {"target": 80.0}}, r"run\.target: is an accuracy and must be in 0\.\.1"),
    ],
)
def test_data_task_and_model_that_do_not_fit_give_one_sentence(y, given, sentence):
    model = given.pop("model", lambda: nn.Linear(6, 1 if y.dtype == np.float32 else 2))
    with pytest.raises(ConfigError, match=sentence) as caught:
        federation(model, X, y, **given)
    assert "\n" not in str(caught.value)


def test_targets_that_are_not_finite_are_refused():
    with pytest.raises(DataError, match="targets hold NaN"):
        federation("mlp", X, np.where(LINE > 2, np.nan, LINE), task="regression")


# ---- batches of other forms


class Counter:
    """The largest error, as torchmetrics counts: batch by batch."""

    def __init__(self) -> None:
        self.worst, self.calls = 0.0, 0

    def reset(self) -> None:
        self.worst = 0.0

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        self.worst = max(self.worst, float((output - y).abs().max()))

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.worst)


def test_a_metric_that_counts_needs_no_outputs_of_the_whole_test_set():
    metric = Counter()
    task = Task(mse_loss, {"worst": metric, "near": lambda output, y: (output - y).abs() < 2}, "worst", "min")
    batches = [(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0])), (torch.tensor([4.0]), torch.tensor([4.0]))]
    for _ in range(2):
        assert task.score(batches).metrics == {"worst": 3.0, "near": 2 / 3}
    assert metric.calls == 4


def test_the_loss_sees_the_whole_batch_and_samples_weigh_the_same():
    task = Task(
        lambda output, batch: (output - batch["y"]).abs().mean(), {"sign": lambda o, b: (o > 0) == (b["y"] > 0)}
    )
    batches = [
        (torch.tensor([1.0, 2.0]), {"y": torch.tensor([0.0, 5.0])}),
        (torch.tensor([4.0]), {"y": torch.tensor([4.0])}),
    ]
    score = task.score(batches)
    assert score.loss == pytest.approx((1 + 3 + 0) / 3) and score.metrics["sign"] == pytest.approx(2 / 3)


def test_a_metric_of_the_whole_test_set_needs_tensors():
    task = Task(lambda output, batch: output.mean(), {"top": lambda output, batch: float(output.max())})
    with pytest.raises(
        ConfigError, match=r"task\.metrics: 'top' returns one number per batch.* update, compute and reset"
    ):
        task.score([(torch.ones(2), {"y": torch.ones(2)})])


@pytest.mark.parametrize(("x", "called"), [(1, (1,)), ((1, 2), (1, 2)), ({"a": 1, "b": 2}, ("a", "b"))])
def test_a_model_is_called_with_the_parts_of_a_batch(x, called):
    class Model(nn.Module):
        def forward(self, *parts, **named):
            return (*parts, *named)

    assert call(Model(), x) == called


@pytest.mark.parametrize(
    ("loss", "metrics", "sentence"),
    [
        (lambda out, y: (out - y).abs(), {}, r"task\.loss: must return one number .* not \(2, 1\); return its mean"),
        (lambda out, y: 1.0, {}, r"task\.loss: must return one number .* not a float"),
        (
            lambda out, y: ((out - y) ** 2).mean(),
            {"both": lambda out, y: torch.ones(3)},
            r"task\.metrics: 'both' returns an array of shape \(3,\) for all test samples; return one number",
        ),
        (
            lambda out, y: ((out - y) ** 2).mean(),
            {"text": lambda out, y: "good"},
            r"task\.metrics: 'text' returns str for all test samples",
        ),
    ],
)
def test_a_loss_or_metric_that_gives_a_vector_is_one_sentence(loss, metrics, sentence):
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    data = x, x.sum(1, keepdims=True)
    with pytest.raises(ConfigError, match=sentence):
        Federation(lambda: nn.Linear(4, 1), data, data, devices=2, task=Task(loss, metrics))


def test_a_metric_that_gives_a_vector_for_the_whole_test_set_is_one_sentence():
    """One value per class can pass for one per sample in a batch of as many."""
    task = Task(lambda out, y: ((out - y) ** 2).mean(), {"per_class": lambda out, y: torch.ones(2)})
    batches = [(torch.zeros(5, 1), torch.zeros(5, 1))]
    with pytest.raises(ConfigError, match=r"'per_class' returns an array of shape \(2,\)"):
        task.score(batches)
