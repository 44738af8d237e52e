"""A module bound to flat vectors, and ways to build one: a factory, a module, or weights from a file.

Parameters, gradients and float buffers are views into flat vectors. Loading a model is one copy, and an SGD step is a
few operations on one vector, for any number of layers.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
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
    same ones. Parts that stay on the device are left out too (``own_layout``).
    """
    tensors, own = _tensors(module), own_names(module)
    if not any(kind == "learnable" for _, _, kind in tensors):
        raise ConfigError("model", "the module has no parameters to train")
    sent = [tensor for tensor in tensors if tensor[0] not in own]
    if not any(kind == "learnable" for _, _, kind in sent):
        raise ConfigError("model.local", "keeps every parameter on the devices; leave some that travel")
    return Layout.build(sent, layer_groups(module))


def own_layout(module: nn.Module) -> Layout:
    """The layout of the parts that stay on the device (``model.local``). Usually it is empty."""
    own = own_names(module)
    return Layout.build([tensor for tensor in _tensors(module) if tensor[0] in own])


def _tensors(module: nn.Module) -> list[tuple[str, tuple[int, ...], Kind]]:
    """Name, shape and kind of everything that training changes."""
    tensors: list[tuple[str, tuple[int, ...], Kind]] = [
        (name, tuple(parameter.shape), "learnable")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            tensors.append((name, tuple(buffer.shape), "buffer" if buffer.is_floating_point() else "counter"))
    return tensors


#: The pattern that stands for the last layer of a network.
LAST_LAYER = "last"
#: The attribute of a module that names the tensors that stay on the device.
_OWN_NAMES = "_freshet_own_names"


def own_names(module: nn.Module) -> frozenset[str]:
    """The names of the tensors that stay on the device."""
    names: frozenset[str] = getattr(module, _OWN_NAMES, frozenset())
    return names


def with_own_parts(factory: Factory, patterns: Sequence[str] | None) -> Factory:
    """A factory for the same modules, in which the tensors that match a pattern stay on the device."""
    return partial(_mark_own_parts, factory, tuple(patterns)) if patterns else factory


def _mark_own_parts(factory: Factory, patterns: tuple[str, ...]) -> nn.Module:
    """A pattern matches the name of a tensor (``head.*``) or the class of the layer that has it (``BatchNorm*``).

    ``last`` stands for the last layer.
    """
    module, found = factory(), set[str]()
    kinds = {name: type(layer).__name__ for name, layer in module.named_modules()}
    names = [name for name, _, _ in _tensors(module)]
    for pattern in patterns:
        matched = {
            name for name in names if fnmatchcase(name, pattern) or fnmatchcase(kinds[name.rpartition(".")[0]], pattern)
        }
        if pattern == LAST_LAYER:
            matched |= set(layer_groups(module)[-1]) & set(names)
        if not matched:
            some = ", ".join(names[:4] + ["..."] * (len(names) > 4))
            raise ConfigError("model.local", f"{pattern!r} matches no parameter of the model, which has {some}")
        found |= matched
    setattr(module, _OWN_NAMES, frozenset(found))
    return module


def tensor_view(vector: Tensor, entry: TensorPlace) -> Tensor:
    """One tensor's part of a flat vector in its own shape. Convolution kernels are in channels-last order."""
    part = vector[entry.span]
    if entry.channels_last:
        out, inner, height, width = entry.shape
        return part.view(out, height, width, inner).permute(0, 3, 1, 2)
    return part.view(entry.shape)


#: Types with 16 bits.
_HALF = (torch.bfloat16, torch.float16)


def in_training_precision(module: nn.Module) -> nn.Module:
    """The module with float32 parameters to train, in place. A frozen 16-bit base stays as it is.

    Layers that train in 16 bits (the head beside a PEFT adapter) become float32 and convert what they take and give.
    Where a module with layers inside trains such parameters of its own, everything becomes float32.
    """
    if not any(parameter.dtype in _HALF and not parameter.requires_grad for parameter in module.parameters()):
        return module.float()
    layers = [layer for layer in module.modules() if any(map(_is_half_and_trains, layer.parameters(recurse=False)))]
    if any(list(layer.children()) for layer in layers):
        return module.float()
    for layer in layers:
        kind = next(p.dtype for p in layer.parameters(recurse=False) if _is_half_and_trains(p))
        layer.float()
        layer.register_forward_pre_hook(_to_float32)
        layer.register_forward_hook(partial(_to_kind, kind))
    return module


def precision_notices(module: nn.Module) -> list[str]:
    """What a user should know about the types of a model's parameters."""
    wide = next((name for name, parameter in module.named_parameters() if parameter.dtype is torch.float64), None)
    return [f"the model has float64 parameters ({wide}); it trains and travels in float32"] if wide else []


def _is_half_and_trains(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype in _HALF


def _to_float32(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in inputs)


def _to_kind(kind: torch.dtype, layer: nn.Module, inputs: Any, output: Any) -> Any:
    return output.to(kind) if isinstance(output, Tensor) and output.dtype is torch.float32 else output


#: The functions of a network that compute with it (``models/base.py``).
_COMPUTING = ("forward", "features", "classify")


def with_autocast(module: nn.Module, device: str) -> nn.Module:
    """The module, in place, computing in bfloat16 where torch holds that safe. Its outputs are float32."""
    for name in _COMPUTING:
        if hasattr(module, name):
            setattr(module, name, partial(_compute_in_bf16, getattr(module, name), device))
    return module


def _compute_in_bf16(function: Callable[..., Any], device: str, *inputs: Any, **named: Any) -> Any:
    with torch.autocast(device, torch.bfloat16):
        return _outputs_to_float32(function(*inputs, **named))


def _outputs_to_float32(output: Any) -> Any:
    """The same output with 16-bit tensors as float32. A dict, such as Hugging Face's outputs are, changes in place."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in _HALF else output
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _outputs_to_float32(value)
    elif type(output) in (tuple, list):
        return type(output)(map(_outputs_to_float32, output))
    return output


def enable_checkpointing(module: nn.Module) -> None:
    """Let the module compute its activations again in the backward pass.

    The non-reentrant kind works with ``torch.autograd.grad`` and with a frozen base.
    """
    enable: Any = getattr(module, "gradient_checkpointing_enable", None)
    key = "training.gradient_checkpointing"
    if not callable(enable):
        problem = f"{type(module).__name__} does not offer it (it has no gradient_checkpointing_enable)"
        raise ConfigError(
            key, f"{problem}; use training.micro_batch_size to save memory, or call torch.utils.checkpoint"
        )
    try:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (ValueError, TypeError, NotImplementedError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(key, f"{type(module).__name__} refuses it: {problem}") from None


def _is_frozen_norm(layer: nn.Module) -> bool:
    """Whether this is a BatchNorm or InstanceNorm whose parameters are all frozen."""
    own = list(layer.parameters(recurse=False))
    return isinstance(layer, _NormBase) and bool(own) and not any(parameter.requires_grad for parameter in own)


class FlatModel:
    """Binds a module to one weight vector and one gradient vector, and parts that stay on the device to two more."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.module = in_training_precision(module).to(device)
        self.layout, self.own = layout_of(module), own_layout(module)
        self.weights, self.own_weights = (torch.zeros(part.size, device=device) for part in (self.layout, self.own))
        self.gradient, self.own_gradient = (
            torch.zeros(part.learnable, device=device) for part in (self.layout, self.own)
        )
        named, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        #: The module's parameters, and their parts of the gradient vector in the same order.
        self.parameters: list[Tensor] = []
        self.gradient_parts: list[Tensor] = []
        #: Buffers of another type, which are copied in and out: counters, and 16-bit ones. The flat vector, the span in
        #: it, and the tensor of each.
        self._counters: list[tuple[Tensor, slice, Tensor]] = []
        #: Flat vector, owner's dict, name and bound tensor of each buffer. A module may replace the tensor in its dict.
        self._buffers: list[tuple[Tensor, dict[str, Tensor | None], str, Tensor]] = []
        vectors = (self.weights, self.gradient), (self.own_weights, self.own_gradient)
        for entry, (weights, gradient) in (
            (entry, pair) for part, pair in zip((self.layout, self.own), vectors, strict=True) for entry in part.entries
        ):
            place = tensor_view(weights, entry)
            if entry.kind == "learnable":
                parameter = named[entry.name]
                place.copy_(parameter.data)
                parameter.data = place
                self.parameters.append(parameter)
                self.gradient_parts.append(tensor_view(gradient, entry))
            else:
                tensor = buffers[entry.name]
                place.copy_(tensor.data)
                owner, _, name = entry.name.rpartition(".")
                self._buffers.append((weights, module.get_submodule(owner)._buffers, name, tensor))
                if entry.kind == "buffer" and tensor.dtype is torch.float32:
                    tensor.data = place
                else:
                    self._counters.append((weights, entry.span, tensor))
        self._frozen_norms = [layer for layer in module.modules() if _is_frozen_norm(layer)]
        #: The device's parts before its first training.
        self.initial_own: Vector = self.own_weights.cpu().numpy().copy()

        kept = {id(tensor) for *_, tensor in self._buffers}
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

    @property
    def own_learnable(self) -> Tensor:
        """The learnable part of what stays on the device."""
        return self.own_weights[: self.own.learnable]

    def train_mode(self) -> None:
        """Set training mode. The running statistics of a frozen norm are frozen as well, as its parameters are."""
        self.module.train()
        for layer in self._frozen_norms:
            layer.eval()

    def gradients_of(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The gradient of a loss, as one tensor per parameter."""
        gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        return gradients

    def collect(self, loss: Tensor) -> None:
        """Write the gradient of a loss into the gradient vector."""
        gradients = self.gradients_of(loss)
        with torch.no_grad():
            torch._foreach_copy_(self.gradient_parts, gradients)

    def clear_gradient(self) -> None:
        """Set the gradient to zero."""
        self.gradient.zero_()
        self.own_gradient.zero_()

    def add_gradient(self, loss: Tensor, weight: float) -> None:
        """Add the gradient of a loss, times a weight."""
        gradients = self.gradients_of(loss)
        with torch.no_grad():
            torch._foreach_add_(self.gradient_parts, gradients, alpha=weight)

    def divide_gradient(self, divisor: float) -> None:
        """Divide the gradient."""
        self.gradient.div_(divisor)
        self.own_gradient.div_(divisor)

    def load(self, weights: Vector) -> None:
        """Copy these weights into the module."""
        self._fill(self.weights, weights)

    def load_own(self, weights: Vector | None) -> None:
        """Copy a device's own parts into the module; None for those of a device that has not trained yet."""
        if self.own.size:
            self._fill(self.own_weights, self.initial_own if weights is None else weights)

    def _fill(self, vector: Tensor, weights: Vector) -> None:
        for place, buffers, name, bound in self._buffers:
            if place is vector:
                buffers[name] = bound
        vector.copy_(torch.from_numpy(weights))
        for place, span, counter in self._counters:
            if place is vector:
                counter.copy_(vector[span].view(counter.shape))

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
        self._collect_buffers()
        copy: Vector = self.weights.cpu().numpy().copy()
        return copy

    def dump_own(self) -> Vector:
        """A copy of the current parts that stay on the device."""
        self._collect_buffers()
        copy: Vector = self.own_weights.cpu().numpy().copy()
        return copy

    def _collect_buffers(self) -> None:
        for _, buffers, name, bound in self._buffers:
            current = buffers[name]
            if current is not bound and current is not None:  # the module has replaced the tensor
                bound.data.copy_(current)
                buffers[name] = bound
        for vector, span, counter in self._counters:
            vector[span].view(counter.shape).copy_(counter)


@dataclass(frozen=True, eq=False)
class FrozenTensors(Mapping[str, NDArray[Any]]):
    """The frozen parameters of a module by name, as arrays that share their memory. 16-bit ones become float32."""

    tensors: dict[str, Tensor]

    @staticmethod
    def of(module: nn.Module) -> "FrozenTensors":
        """All frozen parameters; none of a PEFT model, whose base is kept where it came from."""
        if hasattr(module, "peft_config"):
            return FrozenTensors({})
        named = module.named_parameters()
        return FrozenTensors({name: tensor.detach() for name, tensor in named if not tensor.requires_grad})

    def __getitem__(self, name: str) -> NDArray[Any]:
        tensor = self.tensors[name].cpu()
        return np.ascontiguousarray((tensor.float() if tensor.dtype in _HALF else tensor).numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def as_factory(model: Factory | nn.Module) -> Factory:
    """Return a factory unchanged. Wrap a module in a factory that returns copies of it."""
    if isinstance(model, nn.Module):
        return partial(copy_module, model)
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


def copy_module(module: nn.Module) -> nn.Module:
    """A copy of a module that shares the numbers of frozen parameters, which nobody writes to.

    A large frozen base then exists once, however many copies there are. In worker processes it lies in shared memory.
    """
    shared = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=False)
        for parameter in module.parameters()
        if not parameter.requires_grad and type(parameter) is nn.Parameter
    }
    return copy.deepcopy(module, dict[int, Any](shared))


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
            problem = f"{path}: {name} has shape {tuple(array.shape)}, but the model's has {tuple(state[name].shape)}"
            raise ConfigError("model.start", problem)
        if not bool(array.float().isfinite().all()):
            raise ConfigError("model.start", f"{path}: {name} has numbers that are not finite")
    return partial(_with_tensors, factory, tensors)


def _with_tensors(factory: Factory, tensors: dict[str, Tensor]) -> nn.Module:
    """Build a module with these numbers in its own types. The old ones may be shared, so nobody writes to them."""
    module = factory()
    state = module.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        state[name].data = tensor.to(state[name].dtype, copy=True)
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
    #: Patterns of parts that stay on the devices. The module has their initial numbers.
    local: tuple[str, ...] = ()

    def __call__(self, weights: Vector) -> nn.Module:
        if self.factory is None:
            raise RunError("the model of this run came from Python; pass it, as in result.module(build_model)")
        flat = FlatModel(initial_module(with_own_parts(self.factory, self.local), self.seed))
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
            named[name].data = torch.from_numpy(np.array(array)).to(named[name].dtype)


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
