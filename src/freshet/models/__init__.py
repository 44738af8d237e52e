"""Networks: the six of the FedASMU paper, a small one for the embedded digits, an MLP; layer groups of any module."""

from freshet.models.base import Contrastive, Network, has_features
from freshet.models.groups import layer_groups
from freshet.models.registry import Description, build, count_parameters, describe, names

__all__ = [
    "Contrastive",
    "Description",
    "Network",
    "build",
    "count_parameters",
    "describe",
    "has_features",
    "layer_groups",
    "names",
]
