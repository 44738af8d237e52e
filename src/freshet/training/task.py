"""Tasks: the loss to train on, the metrics to evaluate, and the primary metric.

``classification``, ``binary``, ``multilabel``, ``regression``, ``tokens`` and ``huggingface`` are built in.
``Task(...)`` defines others. A metric is a function of (outputs, targets). If it returns one number per sample, it is
averaged over the test set batch by batch. Otherwise it is called once, with the outputs of the whole test set. An
object with ``update``, ``compute`` and ``reset`` (torchmetrics) is updated batch by batch.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from freshet.data.dataset import label_remedy
from freshet.errors import ConfigError, FreshetError
from freshet.training.batches import Batch, batch_length

Direction = Literal["max", "min"]
Function = Callable[..., Any]
#: The target of tokens that do not count.
IGNORED = -100


def _identity(output: Any, y: Any) -> tuple[Any, Any]:
    return output, y


def call(model: nn.Module, x: Batch) -> Any:
    """``model(x)``; ``model(**x)`` for a dict and ``model(*x)`` for a tuple."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple | list) else model(x)


class Score(NamedTuple):
    """A model's results on the test samples: the task's metrics by name, and the mean loss."""

    metrics: dict[str, float]
    loss: float


@dataclass(frozen=True)
class Task:
    """``loss(outputs, targets)`` returns the mean over a batch. Targets and tables use the metric ``primary``.

    The targets of a batch that is no pair (x, y) are the whole batch. ``forward(model, x)`` calls the model; by default
    that is ``model(x)``, ``model(**x)`` for a dict and ``model(*x)`` for a tuple.
    """

    loss: Function
    metrics: Mapping[str, Any] = field(default_factory=dict)
    primary: str = "loss"
    direction: Direction | None = None
    name: str = "custom"
    #: Rearranges outputs and targets for loss and metrics, for example to one row per token.
    arrange: Callable[[Any, Any], tuple[Any, Any]] = _identity
    forward: Callable[[nn.Module, Any], Any] = call

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

    def output(self, model: nn.Module, x: Batch, y: Batch) -> Any:
        """The model's output for a batch."""
        return self.forward(model, x)

    def batch_loss(self, model: nn.Module, x: Batch, y: Batch) -> Tensor:
        """The loss of a model on a batch."""
        return self.mean_loss(self.output(model, x, y), y)

    def mean_loss(self, output: Any, y: Batch) -> Tensor:
        """The loss to differentiate."""
        loss: Tensor = self.loss(*self.arrange(output, y))
        return loss

    def count_rows(self, output: Any, y: Batch) -> int:
        """What the mean of ``loss`` is over: the rows that ``arrange`` gives, which are samples or tokens."""
        return batch_length(self.arrange(output, y)[1])

    def score(self, batches: Iterable[tuple[Any, Batch]]) -> Score:
        """Loss and metrics over a whole test set, given (outputs, targets) batch by batch."""
        counters = {name: metric for name, metric in self.metrics.items() if _is_counter(metric)}
        functions = {name: metric for name, metric in self.metrics.items() if name not in counters}
        for metric in counters.values():
            metric.reset()
        count, total, sums = 0, 0.0, dict.fromkeys(functions, 0.0)
        whole: dict[str, Function] | None = None
        kept: list[tuple[Tensor, Tensor]] = []
        for output, y in batches:
            rows, targets = self.arrange(output, y)
            size = batch_length(targets)
            count += size
            total += self._loss_sum(output, y, rows, targets) if size else 0.0
            for metric in counters.values():
                metric.update(rows, targets)
            if whole is None:
                whole = {name: f for name, f in functions.items() if not _is_per_sample(f(rows, targets), size)}
            for name, function in functions.items():
                if name not in whole:
                    sums[name] += float(function(rows, targets).sum())
            if whole:
                kept.append(_on_cpu(rows, targets, next(iter(whole))))
        found = {name: value / count if count else math.nan for name, value in sums.items()}
        for name, function in (whole or {}).items():
            outputs, all_targets = zip(*kept, strict=True)
            found[name] = _one_value(name, function(torch.cat(outputs), torch.cat(all_targets)))
        found |= {name: _one_value(name, metric.compute()) for name, metric in counters.items()}
        return Score({name: found[name] for name in self.metrics}, total / count if count else math.nan)

    def _loss_sum(self, output: Any, y: Batch, rows: Any, targets: Any) -> float:
        """The loss summed over samples, given the model's output and its rows."""
        if isinstance(targets, Tensor) and _takes_reduction(self.loss):
            return float(self.loss(rows, targets, reduction="sum")) / _numbers_per_sample(rows, targets, self.loss)
        return float(self.loss(rows, targets)) * batch_length(targets)


class CountingLoss:
    """A task's loss that counts what each mean is over, so that means of parts can be joined exactly."""

    def __init__(self, task: Task) -> None:
        self._task = task
        #: Rows since this was last set to None. It stays None if nobody asked the task.
        self.count: int | None = None

    def mean_loss(self, output: Any, y: Batch) -> Tensor:
        self.count = (self.count or 0) + self._task.count_rows(output, y)
        return self._task.mean_loss(output, y)

    def batch_loss(self, model: nn.Module, x: Batch, y: Batch) -> Tensor:
        return self.mean_loss(self._task.output(model, x, y), y)


# ---- Hugging Face models: how to call them and read what they return; transformers and peft are never imported
#
# A model takes named tensors, ``model(input_ids=..., attention_mask=..., labels=...)``. It returns a ``ModelOutput``
# with its own ``loss`` and ``logits``. Labels of -100 do not count. A causal language model shifts the labels itself:
# position t predicts token t + 1.

#: Other names of the labels in data sets; models call them ``labels``.
_OTHER_NAMES = ("label", "label_ids")


def is_model_output(output: Any) -> bool:
    """Whether this is what a Hugging Face model returns."""
    return isinstance(output, Mapping) and hasattr(output, "to_tuple")


def call_with_labels(model: nn.Module, x: Any, y: Any) -> Any:
    """Call a model with the entries of a batch that it knows, labels included, so that it computes its own loss.

    Like transformers' Trainer, this leaves out entries that are no argument of ``forward``. A tensor x is the model's
    main input, and y are its labels.
    """
    inner: Any = getattr(model, "get_base_model", None)  # a PEFT model has one
    base: nn.Module = model if inner is None else inner()
    if isinstance(x, Mapping):
        given = {"labels" if name in _OTHER_NAMES else name: value for name, value in x.items()}
    else:
        given = {getattr(base, "main_input_name", "input_ids"): x, "labels": y}
    known = _argument_names(type(base).forward)
    if known:
        given = {name: value for name, value in given.items() if name in known}
        if "use_cache" in known:
            given["use_cache"] = False
    return model(**_with_pad_ids(base, given))


@lru_cache
def _argument_names(forward: Callable[..., Any]) -> frozenset[str]:
    """The named arguments of ``forward``."""
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD) - {"self"}


def _with_pad_ids(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Fill up shorter samples with the model's own padding id. Some models look for it to find the last token."""
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if not pad or not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return given
    return given | {"input_ids": ids.masked_fill((mask == 0) & (ids == 0), int(pad))}


def labels_of(y: Any) -> Tensor | None:
    """The labels of a batch."""
    if isinstance(y, Mapping):
        found = next((y[name] for name in ("labels", *_OTHER_NAMES) if name in y), None)
        return found if isinstance(found, Tensor) else None
    return y if isinstance(y, Tensor) else None


def counted_rows(output: Any, y: Any) -> tuple[Any, Any]:
    """Scores and labels, one row per sample or per token that counts; other outputs and batches unchanged."""
    logits, labels = getattr(output, "logits", None), labels_of(y)
    if not isinstance(logits, Tensor) or labels is None or labels.is_floating_point():
        return output, y
    if logits.ndim == 2 and labels.ndim == 1:
        return logits, labels
    if logits.ndim != 3 or labels.ndim != 2:
        return output, y
    if logits.shape[1] > labels.shape[1]:  # virtual tokens of a prompt come first
        logits = logits[:, -labels.shape[1] :]
    if shifts_labels(output):
        logits, labels = logits[:, :-1], labels[:, 1:]
    counts = labels != IGNORED
    return logits[counts], labels[counts]


def shifts_labels(output: Any) -> bool:
    """Whether the model predicts the next token, as the name of its output says."""
    return "CausalLM" in type(output).__name__


def own_loss(output: Any, y: Any) -> Tensor:
    """The model's own loss. A batch in which no label counts has loss 0, where models give NaN."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        problem = "computes no loss for these batches, because they have no labels"
        remedy = "add a column labels; for a language model, labels = input_ids"
        raise ConfigError("task", f"the model {problem}; {remedy}")
    labels = labels_of(y)
    if torch.isnan(loss) and labels is not None and not labels.is_floating_point():
        shown = labels[:, 1:] if labels.ndim == 2 and shifts_labels(output) else labels
        if not bool((shown != IGNORED).any()):
            nothing: Tensor = output.logits.sum() * 0.0
            return nothing
    return loss


@dataclass(frozen=True)
class HuggingFaceTask(Task):
    """The own loss of a Hugging Face model, and the accuracy per sample or per token that counts.

    Metrics get scores and labels, one row per sample or per token. Models that score every token also report the
    perplexity, ``exp(loss)``.
    """

    loss: Function = own_loss
    metrics: Mapping[str, Any] = field(default_factory=lambda: {"accuracy": _right_class})
    primary: str = "accuracy"
    arrange: Callable[[Any, Any], tuple[Any, Any]] = counted_rows

    def output(self, model: nn.Module, x: Batch, y: Batch) -> Any:
        return call_with_labels(model, x, y)

    def mean_loss(self, output: Any, y: Batch) -> Tensor:
        return self.loss(output, y)  # type: ignore[no-any-return]

    def score(self, batches: Iterable[tuple[Any, Batch]]) -> Score:
        per_token = False

        def watch_outputs() -> Iterator[tuple[Any, Batch]]:
            nonlocal per_token
            for output, y in batches:
                logits = getattr(output, "logits", None)
                per_token |= shifts_labels(output) or (isinstance(logits, Tensor) and logits.ndim == 3)
                yield output, y

        score = super().score(watch_outputs())
        if not per_token:
            return score
        return Score(score.metrics | {"perplexity": float(torch.tensor(score.loss).exp())}, score.loss)

    def _loss_sum(self, output: Any, y: Batch, rows: Any, targets: Any) -> float:
        return float(self.loss(output, y)) * batch_length(targets)


def takes_whole_batch(task: Task | str | None) -> bool:
    """Whether the loss gets the whole batch of samples with names, not the target alone."""
    return isinstance(task, Task) or task == "huggingface"


def _is_counter(metric: Any) -> bool:
    """Whether a metric is an object that counts batch by batch, as those of torchmetrics do."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _is_per_sample(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (size,)


def _on_cpu(rows: Any, targets: Any, metric: str) -> tuple[Tensor, Tensor]:
    if isinstance(rows, Tensor) and isinstance(targets, Tensor):
        return rows.cpu(), targets.cpu()
    problem = f"{metric!r} returns one number per batch, and batches of this form cannot be joined"
    remedy = "return one number per sample, or give an object with update, compute and reset"
    raise ConfigError("task.metrics", f"{problem}; {remedy}")


def _one_value(name: str, value: Any) -> float:
    """A metric's value over the whole test set, or one sentence if it is no single number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"an array of shape {tuple(shape)}"
        problem = f"{name!r} returns {what} for all test samples"
        raise ConfigError("task.metrics", f"{problem}; return one number, or one per sample") from None


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


def _token_loss(rows: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy. A batch in which no token counts has loss 0, where torch gives NaN."""
    return cross_entropy(rows, targets, reduction=reduction) if len(targets) else rows.sum()


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
        Task(_token_loss, {"accuracy": _right_class}, "accuracy", name="tokens", arrange=_per_token),
        HuggingFaceTask(name="huggingface"),
    )
}


def check_output(task: Task, output: Any, y: Batch, classes: int) -> None:
    """Raise one sentence unless the task can evaluate this output of a model."""
    if isinstance(task, HuggingFaceTask):
        _check_model_output(task, output, y, classes)
        return
    if is_model_output(output) and task.name != "custom":
        kind = type(output).__name__
        raise ConfigError("model", f'returns a {kind}, as Hugging Face models do; add task="huggingface"')
    if task.name == "custom":
        _check_custom(task, output, y)
        return
    if not isinstance(y, Tensor):
        problem = f"{task.name} needs one target per sample, but the batches have none"
        raise ConfigError("training.task", f"{problem}; name it with data.label_column, or give a Task")
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
    elif output.numel() != y.numel():
        raise ConfigError("model", f"returns {tuple(shape)} for targets of shape {tuple(y.shape)}; they must match")
    else:
        _check_custom(task, output, y)


def _check_model_output(task: HuggingFaceTask, output: Any, y: Batch, classes: int) -> None:
    if not is_model_output(output):
        problem = f"returns a {type(output).__name__}, but task=huggingface needs a Hugging Face model's output"
        raise ConfigError("model", f"{problem}; choose another task")
    task.mean_loss(output, y)
    rows, targets = task.arrange(output, y)
    if task.name == "huggingface" and not (isinstance(targets, Tensor) and not targets.is_floating_point()):
        problem = "huggingface judges by accuracy, which needs whole numbers as labels"
        raise ConfigError("training.task", f'{problem}; give HuggingFaceTask(metrics={{}}, primary="loss") instead')
    if isinstance(rows, Tensor) and rows.ndim == 2 and rows.shape[1] < classes:
        raise ConfigError("model", f"returns {rows.shape[1]} scores, but the data have {classes} classes")
    _check_custom(task, output, y)


def _check_custom(task: Task, output: Any, y: Batch) -> None:
    with _in_one_sentence():
        loss = task.mean_loss(output, y)
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        found = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        remedy = "; return its mean" if isinstance(loss, Tensor) else ""
        raise ConfigError("task.loss", f"must return one number (a tensor of shape ()), not {found}{remedy}")
    with _in_one_sentence():
        task.score([(output, y)])


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Tell in one sentence what a user's loss or metric raises."""
    try:
        yield
    except FreshetError:
        raise
    except Exception as error:  # whatever a user's function may raise
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("task", f"the loss or a metric fails on the model's outputs: {problem}") from error


def output_notices(task: Task, output: Any, y: Batch) -> list[str]:
    """What a user should know about a model's outputs: cross-entropy takes scores, not probabilities."""
    if task.loss is not cross_entropy and not isinstance(task.loss, nn.CrossEntropyLoss):
        return []
    rows, _ = task.arrange(output, y)
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] < 2 or not len(rows):
        return []
    if bool((rows >= 0).all()) and torch.allclose(rows.sum(1), torch.ones(len(rows)), atol=1e-4):
        problem = "the model's outputs add up to 1, as those of a softmax do, but cross-entropy takes raw scores"
        return [f"{problem}; leave the softmax out of the model, or it trains slowly"]
    return []


def _likely_task(y: Any) -> str:
    """The task that targets seem to be for."""
    if y.ndim == 2 and ((y == 0) | (y == 1)).all():
        return "multilabel"
    return "regression" if y.dtype.kind == "f" else "tokens" if y.ndim == 2 else "classification"


def check_targets(task: Task, y: Any, name: str) -> None:
    """Raise one sentence unless the targets of a data set fit a built-in task. Empty ones (N, 0) are in the batches."""
    if y.shape[1:] == (0,):
        return
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
