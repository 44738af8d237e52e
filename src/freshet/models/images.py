"""Image networks of the FedASMU paper, a small one for the built-in digits, and an MLP for any flat sample."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from freshet.errors import ConfigError
from freshet.models.base import (
    BuiltInModel,
    check_flag,
    check_image_shape,
    check_rate,
    check_whole,
    check_wholes,
    conv_block,
    global_max,
    he_initialise,
    norm_layers,
)


class LeNet5(BuiltInModel):
    """LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.

    The usual modern form: two 5x5 convolutions (6, 16) with ReLU and 2x2 max pool, then 120, 84, classes. Images under
    32 pixels get a padding of 2 in the first convolution, so a 28x28 image is seen as the original's 32x32.
    He initialisation. h = the 84 units after ReLU. Parameters with 10 classes: 61,706 (1x28x28), 62,006 (3x32x32).
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "none") -> None:
        super().__init__()
        channels, height, width = check_image_shape("lenet5", input_shape, smallest=12)
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
        self.add_classifier(84, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h


class CNN(BuiltInModel):
    """The "synthetic CNN" of the FedASMU paper, layer by layer as in its table.

    conv 64 channels 2x2 - ReLU - conv 32 channels 2x2 - ReLU - flatten - dense (classes). Softmax is part of the loss.
    h = the flattened 32-channel map after ReLU (and pooling). Parameters on 3x32x32: 297,066 with 10 classes,
    2,889,156 with 100.

    The table leaves open, and we decide:
    - pooling: none. The table lists even activations and the flatten, but no pooling. `pool = True` adds a 2x2 max
      pool after each activation (d = 1,568 instead of 28,800 on 32x32);
    - stride 1, padding 0, biases everywhere: the defaults of the libraries that print such tables;
    - the activation ("null" in the table): ReLU;
    - the dense layer: 10 units in the table, 100 on CIFAR-100;
    - torch's default initialisation. He's makes the dense layer's 28,800 inputs so large that the first loss doubles.

    A projection head on 28,800 features would have 829 million parameters. MOON runs without a head here, or with
    `pool = True`.
    """

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
        check_flag("model.pool", pool)
        channels, rows, columns = check_image_shape("cnn", input_shape, smallest=8)
        layers: list[nn.Module] = []
        for outputs in (64, 32):
            layers += conv_block(channels, outputs, 2, norm)
            channels, rows, columns = outputs, rows - 1, columns - 1
            if pool:
                layers.append(nn.MaxPool2d(2))
                rows, columns = rows // 2, columns // 2
        self.encoder = nn.Sequential(*layers, nn.Flatten(1))
        self.add_classifier(channels * rows * columns, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h


class AlexNet(BuiltInModel):
    """Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep CNNs", NIPS 2012, in its CIFAR form.

    Five convolutions (64 11x11 stride 4, 192 5x5, 384, 256, 256 3x3) with 2x2 max pools after the first, second and
    fifth, then one dense layer. On images this small, the original's two dense layers of 4,096 units would hold nine
    tenths of all parameters. The last pool takes the maximum per channel, so 28, 32 and 64 pixels all give d = 256.
    He initialisation. h = the 256 channel maxima. Parameters on 3x32x32: 2,472,266 with 10 classes.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "none") -> None:
        super().__init__()
        channels, _, _ = check_image_shape("alexnet", input_shape, smallest=17)
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
        self.add_classifier(256, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        return global_max(self.encoder(x))


STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions between two pools."""


class VGG11(BuiltInModel):
    """Simonyan, Zisserman, "Very Deep Convolutional Networks ...", ICLR 2015: configuration A in its CIFAR form.

    Eight 3x3 convolutions (64, 128, 256, 256, 512, 512, 512, 512) in five pooled stages, then dense layers of 512 units
    instead of 4,096. Dropout follows each hidden dense layer as in the paper. `hidden_layers = 0` gives the other
    common CIFAR form: one dense layer on the 512 pooled features, no dropout. The last pool takes the maximum per
    channel, so 28, 32 and 64 pixels all give 512 features. He initialisation. h = the last hidden dense layer after
    ReLU, before its dropout. Parameters on 3x32x32, 10 classes: 9,750,922 (9,225,610 without hidden layers; BatchNorm
    adds 5,504).
    """

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
        check_whole("model.hidden_layers", hidden_layers, low=0)
        p = check_rate("model.dropout", dropout)
        channels, _, _ = check_image_shape("vgg11", input_shape, smallest=16)
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
        self.add_classifier(512, classes, head=head, dropout=p if hidden_layers else 0.0)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.dense(global_max(self.encoder(x)))
        return h


class DigitsCNN(BuiltInModel):
    """A small network for the built-in 1x8x8 digits: quick in tiny batches, no buffers, no dropout.

    conv 16 3x3 - ReLU - max pool - conv 32 3x3 - ReLU - max pool - 64 - classes; He initialisation.
    h = the 64 units after ReLU. Parameters with 10 classes: 13,706.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "none") -> None:
        super().__init__()
        channels, height, width = check_image_shape("digits", input_shape, smallest=4)
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
        self.add_classifier(64, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h


class MLP(BuiltInModel):
    """A multi-layer perceptron on the flattened sample: for tables, toy problems and convex models.

    h = the last hidden layer after ReLU. With `hidden = []` it is logistic regression, and h is the sample.
    """

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
        for units in check_wholes("model.hidden", hidden):
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.encoder = nn.Sequential(*layers)
        he_initialise(self.encoder)
        self.add_classifier(width, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h


def _conv_norm(inputs: int, outputs: int, stride: int, norm: str) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), *norm_layers(norm, outputs)]


class BasicBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = outputs - inputs
        self.residual = nn.Sequential(
            *_conv_norm(inputs, outputs, stride, norm), nn.ReLU(), *_conv_norm(outputs, outputs, 1, norm)
        )

    def shortcut(self, x: Tensor) -> Tensor:
        """Option A: keep every `stride`-th pixel; half of the new zero channels go in front, half behind."""
        if self.stride == 1 and self.new_channels == 0:
            return x
        front = self.new_channels // 2
        return nn.functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, front, self.new_channels - front)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.residual(x))


class ResNet20(BuiltInModel):
    """He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2 (CIFAR).

    One 3x3 convolution, three stages of three basic blocks with 16, 32, 64 channels, global average pool, one dense
    layer. Shortcuts are option A and have no parameters. A normalisation follows each convolution, so convolutions have
    no bias. He initialisation. h = the 64 channel means. Parameters on 3x32x32: 269,722 with 10 classes.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "batch") -> None:
        super().__init__()
        if norm == "none":
            raise ConfigError("model.norm", "resnet20 does not train without normalisation; choose batch or group")
        channels, _, _ = check_image_shape("resnet20", input_shape, smallest=8)
        layers: list[nn.Module] = [*_conv_norm(channels, 16, 1, norm), nn.ReLU()]
        inputs = 16
        for outputs in (16, 32, 64):
            for block in range(3):
                stride = 2 if block == 0 and outputs > 16 else 1
                layers.append(BasicBlock(inputs, outputs, stride, norm))
                inputs = outputs
        self.encoder = nn.Sequential(*layers)
        he_initialise(self.encoder)
        self.add_classifier(64, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h.mean(dim=(2, 3))
