"""The "synthetic CNN" of the FedASMU paper, layer by layer as its table lists it.

conv 64 channels 2x2 - ReLU - conv 32 channels 2x2 - ReLU - flatten - dense (classes). Softmax is part of the loss.

The table leaves open, and we decide:
- pooling: it lists none while it lists even the activations and the flatten, so there is none. `pool = True` adds
  a 2x2 max pool after each activation (d = 1,568 instead of 28,800 on 32x32);
- stride 1, padding 0, biases everywhere (the defaults of the libraries that print such tables);
- the activation ("null" in the table): ReLU;
- the dense layer says 10 units; on CIFAR-100 it has 100;
- torch's own initialisation (He's makes the 28,800 inputs of the dense layer so large that the first loss doubles).

There is no hidden dense layer, so the vector that feeds the final Linear layer, MOON's h, is the flattened map itself.
With 28,800 features a projection head is out of the question (829 million parameters): MOON uses the form without head
here, or `pool = True`. Parameters on 3x32x32: 297,066 with 10 classes, 2,889,156 with 100.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from freshet.models.base import Network
from freshet.models.checks import flag, image_shape
from freshet.models.layers import conv_block


class CNN(Network):
    """h = the flattened 32-channel map after ReLU (and pooling, if asked for)."""

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        head: bool = False,
        norm: str = "none",
        pool: bool = False,
    ) -> None:
        super().__init__()
        flag("model.pool", pool)
        channels, rows, columns = image_shape("cnn", input_shape, smallest=8)
        layers: list[nn.Module] = []
        for outputs in (64, 32):
            layers += conv_block(channels, outputs, 2, norm)
            channels, rows, columns = outputs, rows - 1, columns - 1
            if pool:
                layers.append(nn.MaxPool2d(2))
                rows, columns = rows // 2, columns // 2
        self.encoder = nn.Sequential(*layers, nn.Flatten(1))
        self.finish(channels * rows * columns, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h
