"""ResNet-20: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2 (CIFAR).

One 3x3 convolution, three stages of three basic blocks with 16, 32, 64 channels, global average pool, one dense layer.
Shortcuts are option A: where a stage begins, every second pixel is kept and the new channels are zero, so shortcuts
have no parameters. Convolutions have no bias, for a normalisation follows each one; He initialisation.
Parameters on 3x32x32: 269,722 with 10 classes.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from freshet.errors import ConfigError
from freshet.models.base import Network
from freshet.models.checks import image_shape
from freshet.models.layers import he_initialise, norm_layers


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
        """Option A: keep every `stride`-th pixel, share the new zero channels between front and back."""
        if self.stride == 1 and self.new_channels == 0:
            return x
        front = self.new_channels // 2
        return nn.functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, front, self.new_channels - front)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.residual(x))


class ResNet20(Network):
    """h = the 64 channel means behind the last block."""

    def __init__(self, input_shape: Sequence[int], classes: int, *, head: bool = False, norm: str = "batch") -> None:
        super().__init__()
        if norm == "none":
            raise ConfigError("model.norm", "resnet20 does not train without normalisation; choose batch or group")
        channels, _, _ = image_shape("resnet20", input_shape, smallest=8)
        layers: list[nn.Module] = [*_conv_norm(channels, 16, 1, norm), nn.ReLU()]
        inputs = 16
        for outputs in (16, 32, 64):
            for block in range(3):
                stride = 2 if block == 0 and outputs > 16 else 1
                layers.append(BasicBlock(inputs, outputs, stride, norm))
                inputs = outputs
        self.encoder = nn.Sequential(*layers)
        he_initialise(self.encoder)
        self.finish(64, classes, head=head)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h.mean(dim=(2, 3))
