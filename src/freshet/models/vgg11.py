"""VGG-11 (configuration A): Simonyan, Zisserman, "Very Deep Convolutional Networks ...", ICLR 2015, in its CIFAR form.

Eight 3x3 convolutions (64, 128, 256, 256, 512, 512, 512, 512) in five pooled stages, then dense layers of 512 units
instead of 4,096. Dropout follows each hidden dense layer as in the paper. `hidden_layers = 0` gives the other common
CIFAR form: one dense layer on the 512 pooled features, no dropout. The last pool takes the largest value per channel,
so 28, 32 and 64 pixels all give 512 features. He initialisation.
Parameters on 3x32x32, 10 classes: 9,750,922 (9,225,610 without hidden layers; BatchNorm adds 5,504).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from freshet.models.base import Network
from freshet.models.checks import image_shape, rate, whole
from freshet.models.layers import conv_block, global_max, he_initialise

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions between two pools."""


class VGG11(Network):
    """h = the last hidden dense layer after ReLU, before its dropout."""

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        head: bool = False,
        norm: str = "none",
        hidden_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        whole("model.hidden_layers", hidden_layers, low=0)
        p = rate("model.dropout", dropout)
        channels, _, _ = image_shape("vgg11", input_shape, smallest=16)
        layers: list[nn.Module] = []
        for stage, widths in enumerate(STAGES):
            if stage > 0:
                layers.append(nn.MaxPool2d(2))
            for outputs in widths:
                layers += conv_block(channels, outputs, 3, norm, padding=1)
                channels = outputs
        self.encoder = nn.Sequential(*layers)
        dense: list[nn.Module] = []
        for layer in range(hidden_layers):
            if layer > 0:
                dense.append(nn.Dropout(p))
            dense += [nn.Linear(channels, 512), nn.ReLU()]
        self.dense = nn.Sequential(*dense)
        he_initialise(self)
        self.finish(512, classes, head=head, dropout=p if hidden_layers else 0.0)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.dense(global_max(self.encoder(x)))
        return h
