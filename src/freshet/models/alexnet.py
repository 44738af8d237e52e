"""AlexNet: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep CNNs", NIPS 2012, in its CIFAR form.

Five convolutions (64 11x11 stride 4, 192 5x5, 384, 256, 256 3x3) with 2x2 max pools after the first, second and fifth,
then one dense layer: the two dense layers of 4,096 units of the original would hold nine tenths of all parameters for
images this small. This is the CIFAR form in common use (2.47 M parameters). The last pool takes the largest value per
channel, so 28, 32 and 64 pixels all give d = 256. He initialisation. Parameters on 3x32x32: 2,472,266 with 10 classes.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from freshet.models.base import Network
from freshet.models.checks import image_shape
from freshet.models.layers import conv_block, global_max, he_initialise


class AlexNet(Network):
    """h = the 256 channel maxima behind the fifth convolution."""

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "none") -> None:
        super().__init__()
        channels, _, _ = image_shape("alexnet", input_shape, smallest=17)
        self.encoder = nn.Sequential(
            *conv_block(channels, 64, 11, norm, stride=4, padding=5),
            nn.MaxPool2d(2),
            *conv_block(64, 192, 5, norm, padding=2),
            nn.MaxPool2d(2),
            *conv_block(192, 384, 3, norm, padding=1),
            *conv_block(384, 256, 3, norm, padding=1),
            *conv_block(256, 256, 3, norm, padding=1),
        )
        he_initialise(self.encoder)
        self.finish(256, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        return global_max(self.encoder(x))
