"""Networks: the six of the FedASMU paper, a small one for the embedded digits, an MLP; layer groups of any module."""

from freshet.models.base import Contrastive, BuiltInModel, has_features
from freshet.models.groups import layer_groups
from freshet.models.registry import ModelInfo, build, count_parameters, describe, names

__all__ = [
    "Contrastive",
    "ModelInfo",
    "BuiltInModel",
    "build",
    "count_parameters",
    "describe",
    "has_features",
    "layer_groups",
    "names",
]
