"""LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.

Today's usual form: two 5x5 convolutions (6, 16) with ReLU and 2x2 max pool, then 120, 84, classes. Images under
32 pixels get a padding of 2 in the first convolution, so 28x28 is seen as the 32x32 of the original. He initialisation.
Parameters with 10 classes: 61,706 (1x28x28), 62,006 (3x32x32).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from freshet.models.base import Network
from freshet.models.checks import image_shape
from freshet.models.layers import conv_block, he_initialise


class LeNet5(Network):
    """h = the 84 units after ReLU."""

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "none") -> None:
        super().__init__()
        channels, height, width = image_shape("lenet5", input_shape, smallest=12)
        padding = 2 if min(height, width) < 32 else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        self.encoder = nn.Sequential(
            *conv_block(channels, 6, 5, norm, padding=padding),
            nn.MaxPool2d(2),
            *conv_block(6, 16, 5, norm),
            nn.MaxPool2d(2),
            nn.Flatten(1),
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        he_initialise(self.encoder)
        self.finish(84, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h
