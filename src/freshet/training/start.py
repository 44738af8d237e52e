"""Where a model begins: a factory, a module that is already there, or weights from a file."""

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import nn

from freshet.errors import ConfigError
from freshet.training.flat import Factory, build_quietly


def as_factory(model: Factory | nn.Module) -> Factory:
    """A factory as it is; a module as one that gives a copy of it each time."""
    if isinstance(model, nn.Module):
        return partial(copy.deepcopy, model)
    if not callable(model):
        raise ConfigError(
            "model", f"must be a module, a function that makes one, or a name, not {type(model).__name__}"
        )
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        problem = f"{name} wants arguments ({error}); give a function without any, as in lambda: {name}(...)"
        raise ConfigError("model", problem) from None
    except ValueError:  # built-in code without a signature
        pass
    return model


def started(factory: Factory, path: Path) -> Factory:
    """The same modules, with the tensors of a safetensors file in place of those of the same name.

    The file is read here, once: workers get the numbers, wherever they are.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError("model.start", f"{path} cannot be read as safetensors ({error})") from None
    state = build_quietly(factory).state_dict()
    strange = [name for name in tensors if name not in state]
    if strange or not tensors:
        what = f"holds {strange[0]!r}, which the model has not" if strange else "holds no tensors"
        raise ConfigError("model.start", f"{path} {what}; it must be of the same network")
    for name, array in tensors.items():
        if tuple(array.shape) != tuple(state[name].shape):
            problem = f"{path}: {name} has shape {array.shape}, but the model's has {tuple(state[name].shape)}"
            raise ConfigError("model.start", problem)
        if not np.isfinite(array).all():
            raise ConfigError("model.start", f"{path}: {name} holds numbers that are not finite")
    return partial(_with_tensors, factory, tensors)


def _with_tensors(factory: Factory, tensors: dict[str, NDArray[Any]]) -> nn.Module:
    module = factory()
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}, strict=False)
    return module
