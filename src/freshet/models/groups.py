"""Layer groups: the unit in which FedLWS shrinks a model (Shi et al., ICLR 2025)."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def _outputs(layer: nn.Module) -> int | None:
    """Output features of a weight layer (convolution, linear, embedding), None for any other module."""
    weight = getattr(layer, "weight", None)
    if weight is None:
        return None
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag | _ConvTransposeNd):
        groups = layer.groups if isinstance(layer, _ConvTransposeNd) else 1
        return int(weight.shape[1]) * groups
    if isinstance(layer, nn.Linear | _ConvNd):
        return int(weight.shape[0])
    return None


def layer_groups(module: nn.Module) -> list[list[str]]:
    """Names of all parameters, as in `named_parameters()`, in groups of one layer each, in registration order.

    A group is the weight of one convolution, linear or embedding layer with its bias and the affine parameters of the
    norm layer directly after it (next registered module with parameters, as many features as the layer has outputs).
    Any other module's own parameters (LSTM, attention, bare `nn.Parameter`) form one group. A shared parameter counts
    once, where it is first registered; buffers belong to no group.
    """
    groups: list[list[str]] = []
    seen: set[int] = set()
    outputs: int | None = None
    for prefix, layer in module.named_modules():
        own = [(name, p) for name, p in layer.named_parameters(prefix, recurse=False) if id(p) not in seen]
        if not own:
            continue
        seen.update(id(p) for _, p in own)
        names = [name for name, _ in own]
        if outputs is not None and isinstance(layer, _NORMS) and own[0][1].numel() == outputs:
            groups[-1].extend(names)
            outputs = None
        else:
            groups.append(names)
            outputs = _outputs(layer)
    return groups
