"""A small network for the embedded 1x8x8 handwritten digits: quick in tiny batches, no buffers, no dropout.

conv 16 3x3 - ReLU - max pool - conv 32 3x3 - ReLU - max pool - 64 - classes; He initialisation.
Parameters with 10 classes: 13,706.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from freshet.models.base import Network
from freshet.models.checks import image_shape
from freshet.models.layers import conv_block, he_initialise


class DigitsCNN(Network):
    """h = the 64 units after ReLU."""

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "none") -> None:
        super().__init__()
        channels, height, width = image_shape("digits", input_shape, smallest=4)
        self.encoder = nn.Sequential(
            *conv_block(channels, 16, 3, norm, padding=1),
            nn.MaxPool2d(2),
            *conv_block(16, 32, 3, norm, padding=1),
            nn.MaxPool2d(2),
            nn.Flatten(1),
            nn.Linear(32 * (height // 4) * (width // 4), 64),
            nn.ReLU(),
        )
        he_initialise(self.encoder)
        self.finish(64, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h
