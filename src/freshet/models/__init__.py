"""Networks: the six of the FedASMU paper, a small one for the built-in digits, and an MLP."""

from freshet.models.base import BuiltInModel, Contrastive, has_features, layer_groups
from freshet.models.registry import ModelInfo, build, count_parameters, describe, names

__all__ = [
    "BuiltInModel",
    "Contrastive",
    "ModelInfo",
    "build",
    "count_parameters",
    "describe",
    "has_features",
    "layer_groups",
    "names",
]
