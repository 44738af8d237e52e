"""A multi-layer perceptron on the flattened sample: tables, toy problems, and (with no hidden layer) a convex model."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from freshet.models.base import Network
from freshet.models.checks import wholes
from freshet.models.layers import he_initialise


class MLP(Network):
    """h = the last hidden layer after ReLU; with `hidden = []`, logistic regression, h is the sample itself."""

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        head: bool = False,
        norm: str = "none",
        hidden: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        width = math.prod(input_shape)
        layers: list[nn.Module] = [nn.Flatten(1)]
        for units in wholes("model.hidden", hidden):
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.encoder = nn.Sequential(*layers)
        he_initialise(self.encoder)
        self.finish(width, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h
