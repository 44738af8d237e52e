"""A module bound to flat vectors, and ways to build one: a factory, a module, or weights from a file.

Parameters, gradients and float buffers are views into flat vectors. Loading a model is one copy, and an SGD step is a
few operations on one vector, for any number of layers.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from freshet.core.layout import Kind, Layout, TensorPlace
from freshet.core.streams import torch_seed
from freshet.core.vectors import Vector
from freshet.errors import ConfigError, RunError
from freshet.models.base import layer_groups

Factory = Callable[[], nn.Module]


def build_module(factory: Factory, seed: int | None = None) -> nn.Module:
    """Build a module without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError("model", f"must build a torch.nn.Module, but returned {type(module).__name__}")
    _check_filled(module)
    return module


def _check_filled(module: nn.Module) -> None:
    """Raise one sentence if a tensor has no shape or no numbers."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError("model", f"{name} has no shape yet; run one sample through the module when building it")
        if tensor.is_meta:
            raise ConfigError("model", f"{name} is on the meta device and has no numbers; build it on the CPU")


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module's flat vector: trainable parameters, float buffers, integer counters.

    Frozen parameters (``requires_grad`` is False) are left out. They are not sent, because every process builds the
    same ones.
    """
    tensors: list[tuple[str, tuple[int, ...], Kind]] = [
        (name, tuple(parameter.shape), "learnable")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            tensors.append((name, tuple(buffer.shape), "buffer" if buffer.is_floating_point() else "counter"))
    if not any(kind == "learnable" for _, _, kind in tensors):
        raise ConfigError("model", "the module has no parameters to train")
    return Layout.build(tensors, layer_groups(module))


def tensor_view(vector: Tensor, entry: TensorPlace) -> Tensor:
    """One tensor's part of a flat vector in its own shape. Convolution kernels are in channels-last order."""
    part = vector[entry.span]
    if entry.channels_last:
        out, inner, height, width = entry.shape
        return part.view(out, height, width, inner).permute(0, 3, 1, 2)
    return part.view(entry.shape)


class FlatModel:
    """Binds a module to one weight vector and one gradient vector."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.module = module.float().to(device)
        self.layout = layout_of(module)
        self.weights = torch.zeros(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.learnable, device=device)
        named, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        #: The module's parameters, and their parts of the gradient vector in the same order.
        self.parameters: list[Tensor] = []
        self.gradient_parts: list[Tensor] = []
        self._counters: list[tuple[slice, Tensor]] = []
        #: Owner's dict, name and bound tensor of each buffer. A module may replace the tensor in its dict.
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        for entry in self.layout.entries:
            place = tensor_view(self.weights, entry)
            if entry.kind == "learnable":
                parameter = named[entry.name]
                place.copy_(parameter.data)
                parameter.data = place
                self.parameters.append(parameter)
                self.gradient_parts.append(tensor_view(self.gradient, entry))
            else:
                tensor = buffers[entry.name]
                place.copy_(tensor.data)
                owner, _, name = entry.name.rpartition(".")
                self._buffers.append((module.get_submodule(owner)._buffers, name, tensor))
                if entry.kind == "buffer":
                    tensor.data = place
                else:
                    self._counters.append((entry.span, tensor))

        kept = {id(tensor) for _, _, tensor in self._buffers}
        self._hidden = [
            (owner._buffers, name, None if buffer is None else buffer.clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if id(buffer) not in kept
        ]

    @property
    def learnable(self) -> Tensor:
        """The learnable part of the weights."""
        return self.weights[: self.layout.learnable]

    def gradients_of(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The gradient of a loss, as one tensor per parameter."""
        gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        return gradients

    def collect(self, loss: Tensor) -> None:
        """Write the gradient of a loss into the gradient vector."""
        gradients = self.gradients_of(loss)
        with torch.no_grad():
            torch._foreach_copy_(self.gradient_parts, gradients)

    def load(self, weights: Vector) -> None:
        """Copy these weights into the module."""
        for buffers, name, bound in self._buffers:
            buffers[name] = bound
        self.weights.copy_(torch.from_numpy(weights))
        for span, counter in self._counters:
            counter.copy_(self.weights[span].view(counter.shape))

    def reset_hidden(self) -> None:
        """Reset buffers outside the model's state to their initial values, so that no trip affects the next."""
        for buffers, name, initial in self._hidden:
            buffers[name] = None if initial is None else initial.clone()

    def hidden_state(self) -> list[NDArray[Any] | None]:
        """The current values of those buffers."""
        now = (buffers[name] for buffers, name, _ in self._hidden)
        return [None if buffer is None else buffer.cpu().numpy().copy() for buffer in now]

    def set_hidden_state(self, values: Sequence[NDArray[Any] | None]) -> None:
        """The inverse of ``hidden_state``."""
        for (buffers, name, _), value in zip(self._hidden, values, strict=True):
            buffers[name] = None if value is None else torch.from_numpy(np.array(value)).to(self.weights.device)

    def dump(self) -> Vector:
        """A copy of the current weights."""
        for buffers, name, bound in self._buffers:
            current = buffers[name]
            if current is not bound and current is not None:  # the module has replaced the tensor
                bound.data.copy_(current)
                buffers[name] = bound
        for span, counter in self._counters:
            self.weights[span].view(counter.shape).copy_(counter)
        copy: Vector = self.weights.cpu().numpy().copy()
        return copy


def as_factory(model: Factory | nn.Module) -> Factory:
    """Return a factory unchanged. Wrap a module in a factory that returns copies of it."""
    if isinstance(model, nn.Module):
        return partial(copy.deepcopy, model)
    if not callable(model):
        raise ConfigError(
            "model", f"must be a module, a function that builds one, or a name, not {type(model).__name__}"
        )
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        problem = f"{name} needs arguments ({error}); give a function without any, such as lambda: {name}(...)"
        raise ConfigError("model", problem) from None
    except ValueError:  # built-in code without a signature
        pass
    return model


def with_start_weights(factory: Factory, path: Path) -> Factory:
    """A factory for the same modules, with tensors from a safetensors file in place of those of the same name.

    The file is read once, here. Workers receive the numbers and need no file.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError("model.start", f"{path} cannot be read as safetensors ({error})") from None
    state = build_module(factory).state_dict()
    strange = [name for name in tensors if name not in state]
    if strange or not tensors:
        what = f"has {strange[0]!r}, which the model lacks" if strange else "has no tensors"
        raise ConfigError("model.start", f"{path} {what}; give a file of the same network")
    for name, array in tensors.items():
        if tuple(array.shape) != tuple(state[name].shape):
            problem = f"{path}: {name} has shape {array.shape}, but the model's has {tuple(state[name].shape)}"
            raise ConfigError("model.start", problem)
        if not np.isfinite(array).all():
            raise ConfigError("model.start", f"{path}: {name} has numbers that are not finite")
    return partial(_with_tensors, factory, tensors)


def _with_tensors(factory: Factory, tensors: dict[str, NDArray[Any]]) -> nn.Module:
    module = factory()
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}, strict=False)
    return module


def initial_weights(factory: Factory, seed: int) -> Vector:
    """The first global model: the factory's own initialisation under a keyed seed."""
    return FlatModel(initial_module(factory, seed)).dump()


def initial_module(factory: Factory, seed: int) -> nn.Module:
    """A module with the same numbers in every process, frozen parameters included."""
    return build_module(factory, torch_seed(seed, "model"))


@dataclass(frozen=True)
class ModuleBuilder:
    """Builds a module from flat weights. Its first layer normalises inputs if the data set needs that."""

    #: None if only the user knows the model.
    factory: Factory | None
    seed: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    #: Frozen parameters that differ from those of a newly built model.
    frozen: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __call__(self, weights: Vector) -> nn.Module:
        if self.factory is None:
            raise RunError("the model of this run came from Python; pass it, as in result.module(build_model)")
        flat = FlatModel(initial_module(self.factory, self.seed))
        if flat.layout.size != len(weights):
            raise RunError(f"this model has {flat.layout.size:,} numbers, but the run's model has {len(weights):,}")
        flat.load(weights)
        self._load_frozen(flat.module)
        network = flat.module.eval()
        if self.mean is None or self.std is None:
            return network
        return nn.Sequential(OrderedDict(prepare=Prepare(self.mean, self.std), network=network)).eval()

    def _load_frozen(self, module: nn.Module) -> None:
        """Copy the frozen parameters into the module."""
        named = dict(module.named_parameters())
        for name, array in self.frozen.items():
            if name not in named or tuple(named[name].shape) != array.shape:
                raise RunError(f"this model has no {name!r} of shape {array.shape}, but the run's model has")
            named[name].data.copy_(torch.from_numpy(np.array(array)))


class Prepare(nn.Module):
    """``(x - mean) / std`` per channel of (N, C, H, W), with x / 255 for uint8 images."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 255.0 if x.dtype is torch.uint8 else 1.0
        return (x.float() - self.mean * scale) / (self.std * scale)
