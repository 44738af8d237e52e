"""Networks by name, for configurations and the command line."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from freshet.errors import ConfigError
from freshet.models.base import NORMS, BuiltInModel, check_flag, check_whole
from freshet.models.charlstm import CharLSTM
from freshet.models.images import CNN, MLP, VGG11, AlexNet, DigitsCNN, LeNet5, ResNet20
from freshet.models.textcnn import TextCNN


@dataclass(frozen=True)
class _Entry:
    network: Callable[..., BuiltInModel]
    summary: str
    norms: tuple[str, ...]  # the first is the default
    shape: tuple[int, ...]  # reference sample; with `classes` it gives the parameter count in `describe`
    classes: int
    vocabulary: int | None = None


_PLAIN = ("none", "batch", "group")
_NETWORKS = {
    "lenet5": _Entry(LeNet5, "LeNet-5 with ReLU and max pooling (LeCun et al. 1998)", _PLAIN, (1, 28, 28), 10),
    "cnn": _Entry(CNN, "two 2x2 convolutions, 64 and 32 channels (FedASMU paper)", _PLAIN, (3, 32, 32), 10),
    "resnet20": _Entry(ResNet20, "ResNet-20, option A shortcuts (He et al. 2016)", ("batch", "group"), (3, 32, 32), 10),
    "alexnet": _Entry(AlexNet, "AlexNet, CIFAR form (Krizhevsky et al. 2012)", _PLAIN, (3, 32, 32), 10),
    "vgg11": _Entry(VGG11, "VGG-11, CIFAR form (Simonyan, Zisserman 2015)", _PLAIN, (3, 32, 32), 10),
    "textcnn": _Entry(TextCNN, "convolutions over words (Kim 2014)", ("none",), (256,), 2, vocabulary=20_000),
    "charlstm": _Entry(CharLSTM, "LSTM over characters (McMahan et al. 2017)", ("none",), (80,), 65, vocabulary=65),
    "mlp": _Entry(MLP, "multi-layer perceptron on the flattened sample", ("none",), (1, 8, 8), 10),
    "digits": _Entry(DigitsCNN, "small network for the built-in 8x8 digits", _PLAIN, (1, 8, 8), 10),
}
_COMMON = {"self", "input_shape", "classes", "head", "norm", "vocabulary", "pad_id"}


@dataclass(frozen=True)
class ModelInfo:
    """One line about a network. `parameters` is counted for the given sample shape and classes."""

    name: str
    summary: str
    norms: tuple[str, ...]
    options: dict[str, object]
    input_shape: tuple[int, ...]
    classes: int
    vocabulary: int | None
    parameters: int


def names() -> list[str]:
    """Return the names that `build` accepts."""
    return list(_NETWORKS)


def count_parameters(module: nn.Module) -> int:
    """Return the number of learnable values."""
    return sum(p.numel() for p in module.parameters())


def _options(entry: _Entry) -> dict[str, object]:
    """Return the network-specific options with their defaults."""
    signature = inspect.signature(entry.network)
    return {k: v.default for k, v in signature.parameters.items() if k not in _COMMON}


def _entry(name: str) -> _Entry:
    try:
        return _NETWORKS[name]
    except (KeyError, TypeError):
        raise ConfigError("model.name", f"{name!r} is not known; choose one of {', '.join(_NETWORKS)}") from None


def build(
    name: str,
    *,
    input_shape: Sequence[int],
    classes: int,
    head: bool = False,
    norm: str | None = None,
    vocabulary: int | None = None,
    pad_id: int | None = None,
    **options: object,
) -> BuiltInModel:
    """Build a network with weights from torch's global random stream.

    Parameters
    ----------
    name : one of `names()`.
    input_shape : one sample, (channels, height, width) for images, (length,) for token ids.
    classes : number of classes.
    head : MOON's projection head between encoder and classifier.
    norm : "batch", "group" or "none"; None means the network's default.
    vocabulary, pad_id : number of token ids and the padding id (0 if None), for text only.
    options : network-specific options, see `describe()`.
    """
    entry = _entry(name)
    shape = tuple(check_whole("model.input_shape", side) for side in input_shape)
    check_whole("model.classes", classes, low=1)
    check_flag("model.head", head)
    known = _options(entry)
    for option in options:
        if option not in known:
            allowed = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"model.{option}", f"{name} does not know this option; {allowed}")
    if norm is None:
        norm = entry.norms[0]
    if norm not in NORMS:
        raise ConfigError("model.norm", f"{norm!r} is not known; choose one of {', '.join(NORMS)}")
    if norm not in entry.norms:
        raise ConfigError("model.norm", f"{norm!r} is not possible for {name}; choose one of {', '.join(entry.norms)}")

    if entry.vocabulary is not None:
        if vocabulary is None or len(shape) != 1:
            raise ConfigError(
                "model.name", f"{name} reads token ids and needs their vocabulary, but a sample has shape {shape}"
            )
        if "pad_id" in inspect.signature(entry.network).parameters:
            options["pad_id"] = 0 if pad_id is None else pad_id
        return entry.network(classes, vocabulary, head=head, **options)
    if vocabulary is not None:
        text = ", ".join(n for n, e in _NETWORKS.items() if e.vocabulary is not None)
        raise ConfigError("model.name", f"{name} cannot read text (token ids); choose one of {text}")
    return entry.network(shape, classes, head=head, norm=norm, **options)


def describe() -> list[ModelInfo]:
    """Describe every network, with parameter counts at a reference shape. Allocates no weights."""
    rows = []
    for name, entry in _NETWORKS.items():
        with torch.device("meta"):
            network = build(name, input_shape=entry.shape, classes=entry.classes, vocabulary=entry.vocabulary)
        rows.append(
            ModelInfo(
                name=name,
                summary=entry.summary,
                norms=entry.norms,
                options=_options(entry),
                input_shape=entry.shape,
                classes=entry.classes,
                vocabulary=entry.vocabulary,
                parameters=count_parameters(network),
            )
        )
    return rows
