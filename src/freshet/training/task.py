"""Tasks: the loss to train on, the metrics to evaluate, and the primary metric.

``classification``, ``binary``, ``multilabel``, ``regression`` and ``tokens`` are built in. ``Task(...)`` defines
others. A metric is a function of (outputs, targets). If it returns one number per sample, it is averaged over the test
set batch by batch. Otherwise it is called once, with the outputs of the whole test set.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from freshet.data.dataset import label_remedy
from freshet.errors import ConfigError

Direction = Literal["max", "min"]
Function = Callable[..., Any]
#: The target of tokens to ignore.
IGNORED = -100


def _identity(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return output, y


class Score(NamedTuple):
    """A model's results on the test samples: the task's metrics by name, and the mean loss."""

    metrics: dict[str, float]
    loss: float


@dataclass(frozen=True)
class Task:
    """``loss(outputs, targets)`` returns the mean over a batch. Targets and tables use the metric ``primary``."""

    loss: Function
    metrics: Mapping[str, Function] = field(default_factory=dict)
    primary: str = "loss"
    direction: Direction | None = None
    name: str = "custom"
    #: Rearranges outputs and targets for loss and metrics, for example to one row per token.
    arrange: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _identity

    def __post_init__(self) -> None:
        if self.primary not in (*self.metrics, "loss"):
            known = ", ".join((*self.metrics, "loss"))
            raise ConfigError("task.primary", f"must be one of {known}, but {self.primary!r} was given")
        taken = {"loss", "time", "version", "wall_seconds"} & set(self.metrics)
        if taken:
            raise ConfigError("task.metrics", f"{sorted(taken)[0]!r} is a reserved name; choose another")
        if self.direction not in ("max", "min", None):
            raise ConfigError("task.direction", f"must be 'max' or 'min', but {self.direction!r} was given")
        if self.direction is None:
            object.__setattr__(self, "direction", "min" if self.primary == "loss" else "max")

    def mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss to differentiate."""
        loss: Tensor = self.loss(*self.arrange(output, y))
        return loss

    def score(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
        """Loss and metrics over a whole test set, given (outputs, targets) batch by batch."""
        count, total, sums = 0, 0.0, dict.fromkeys(self.metrics, 0.0)
        whole: dict[str, Function] | None = None
        kept: list[tuple[Tensor, Tensor]] = []
        for output, y in batches:
            output, y = self.arrange(output, y)
            count += len(y)
            total += self._loss_sum(output, y)
            if whole is None:
                whole = {name: f for name, f in self.metrics.items() if not _is_per_sample(f(output, y), y)}
            for name, function in self.metrics.items():
                if name not in whole:
                    sums[name] += float(function(output, y).sum())
            if whole:
                kept.append((output.cpu(), y.cpu()))
        found = {name: value / count for name, value in sums.items()}
        for name, function in (whole or {}).items():
            outputs, targets = zip(*kept, strict=True)
            found[name] = float(function(torch.cat(outputs), torch.cat(targets)))
        return Score(found, total / count)

    def _loss_sum(self, output: Tensor, y: Tensor) -> float:
        """The loss summed over samples."""
        if _takes_reduction(self.loss):
            return float(self.loss(output, y, reduction="sum")) / _numbers_per_sample(output, y, self.loss)
        return float(self.loss(output, y)) * len(y)


def _is_per_sample(value: Any, y: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == y.shape[:1]


def _takes_reduction(function: Function) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _numbers_per_sample(output: Tensor, y: Tensor, loss: Function) -> float:
    """How many numbers of a sample torch's losses average over: 1 for class labels."""
    return max(1, output.numel() // max(1, len(y))) if y.is_floating_point() else 1.0


# ---- built-in tasks


def _right_class(output: Tensor, y: Tensor) -> Tensor:
    return output.argmax(1) == y


def _one_number(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape an output (N, 1) to match N targets."""
    return output.reshape(y.shape), y.float()


def _right_side(output: Tensor, y: Tensor) -> Tensor:
    right = (output > 0) == (y > 0.5)
    return right if right.ndim == 1 else right.float().flatten(1).mean(1)


def _f1(output: Tensor, y: Tensor) -> float:
    """``2 TP / (2 TP + FP + FN)`` over all labels of all samples."""
    said, true = output > 0, y > 0.5
    both = int((said & true).sum())
    return 2 * both / max(1, int(said.sum()) + int(true.sum()))


def _absolute(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).abs().flatten(1).mean(1) if y.ndim > 1 else (output - y).abs()


def _root_mean_square(output: Tensor, y: Tensor) -> float:
    return float(mse_loss(output.double(), y.double()).sqrt())


def _r2(output: Tensor, y: Tensor) -> float:
    """``R^2 = 1 - sum (y - output)^2 / sum (y - mean y)^2``."""
    output, y = output.double(), y.double()
    spread = float(((y - y.mean(0)) ** 2).sum())
    return 1.0 - float(((y - output) ** 2).sum()) / spread if spread > 0 else float("nan")


def _per_token(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape (B, T, V) and (B, T) to one row per token, without ignored tokens."""
    flat, targets = output.reshape(-1, output.shape[-1]), y.reshape(-1)
    counts = targets != IGNORED
    return flat[counts], targets[counts]


TASKS = {
    task.name: task
    for task in (
        Task(cross_entropy, {"accuracy": _right_class}, "accuracy", name="classification"),
        Task(
            binary_cross_entropy_with_logits,
            {"accuracy": _right_side},
            "accuracy",
            name="binary",
            arrange=_one_number,
        ),
        Task(
            binary_cross_entropy_with_logits,
            {"f1": _f1, "accuracy": _right_side},
            "f1",
            name="multilabel",
            arrange=_one_number,
        ),
        Task(
            mse_loss,
            {"rmse": _root_mean_square, "mae": _absolute, "r2": _r2},
            "rmse",
            "min",
            name="regression",
            arrange=_one_number,
        ),
        Task(cross_entropy, {"accuracy": _right_class}, "accuracy", name="tokens", arrange=_per_token),
    )
}


def check_output(task: Task, output: Any, y: Tensor, classes: int) -> None:
    """Raise one sentence unless the task can evaluate this output of a model."""
    shape = getattr(output, "shape", None)
    if not isinstance(output, Tensor) or shape is None or shape[:1] != y.shape[:1]:
        raise ConfigError("model", f"must return one row of outputs per sample, not {shape or type(output).__name__}")
    if task.name == "classification":
        if output.ndim != 2:
            raise ConfigError("model", f"must return one row of class scores per sample, not {tuple(shape)}")
        if output.shape[1] < classes:
            hint = "; if labels start at 1, give y - 1" if output.shape[1] == classes - 1 else ""
            raise ConfigError("model", f"returns {output.shape[1]} scores, but the data have {classes} classes{hint}")
    elif task.name == "tokens":
        if output.ndim != 3 or output.shape[:2] != y.shape or output.shape[2] < classes:
            wanted = f"(samples, {y.shape[1]}, at least {classes})"
            raise ConfigError("model", f"must return scores of shape {wanted} for tokens, not {tuple(shape)}")
    elif task.name != "custom" and output.numel() != y.numel():
        raise ConfigError("model", f"returns {tuple(shape)} for targets of shape {tuple(y.shape)}; they must match")
    else:
        _check_custom(task, output, y)


def _check_custom(task: Task, output: Tensor, y: Tensor) -> None:
    try:
        loss = task.mean_loss(output, y)
        task.score([(output, y)])
    except Exception as error:  # whatever a user's function may raise
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("task", f"the loss or a metric fails on the model's outputs: {problem}") from error
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise ConfigError(
            "task.loss", f"must return one number (a tensor of shape ()), not {getattr(loss, 'shape', loss)}"
        )


def _likely_task(y: Any) -> str:
    """The task that targets seem to be for."""
    if y.ndim == 2 and ((y == 0) | (y == 1)).all():
        return "multilabel"
    return "regression" if y.dtype.kind == "f" else "tokens" if y.ndim == 2 else "classification"


def check_targets(task: Task, y: Any, name: str) -> None:
    """Raise one sentence unless the targets of a data set fit a built-in task."""
    classes = y.dtype.kind == "i" and y.ndim == 1
    needs = {
        "classification": (classes, "one whole number per sample: class labels"),
        "binary": (classes and y.max() <= 1, "0 or 1 per sample"),
        "multilabel": (y.ndim == 2 and y.min() >= 0 and y.max() <= 1, "a row of 0 and 1 per sample"),
        "regression": (y.dtype.kind == "f", "real numbers"),
        "tokens": (y.dtype.kind == "i" and y.ndim == 2, "a row of whole numbers per sample"),
    }
    fits, wanted = needs.get(task.name, (True, ""))
    if not fits:
        found = label_remedy(y) if task.name in ("classification", "binary") else None
        other = _likely_task(y)
        problem = f"{name} has targets of type {y.dtype} and shape {y.shape}, but {task.name} needs {wanted}"
        if found is None:
            raise ConfigError("training.task", f"{problem}; try {other!r}")
        amounts = ", or try 'regression' if they are amounts" if "astype" in found.give else ""
        raise ConfigError("training.task", f"{problem}; these are {found.looks}: give {found.give}{amounts}")
