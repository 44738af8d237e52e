"""Layer groups of built-in and user modules."""

import pytest
import torch
from torch import Tensor, nn

from freshet.models import build, layer_groups, names


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("norm", [None, "group", "batch"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", names())
def test_every_parameter_is_in_one_group_in_order(name: str, head: bool, norm: str | None) -> None:
    if name in ("mlp", "textcnn", "charlstm"):
        norm = None
    options: dict[str, object] = {"pool": True} if name == "cnn" else {}
    text = name in ("textcnn", "charlstm")
    with torch.device("meta"):
        network = build(
            name,
            input_shape=(9,) if text else (3, 32, 32),
            classes=10,
            head=head,
            norm=norm,
            vocabulary=30 if text else None,
            **options,
        )
    groups = layer_groups(network)
    assert [name for group in groups for name in group] == names_of(network)
    assert all(groups)
    weighted = nn.Conv1d | nn.Conv2d | nn.Linear | nn.Embedding | nn.LSTM
    weight_layers = [m for m in network.modules() if isinstance(m, weighted)]
    assert len(groups) == len(weight_layers)


def test_lenet5_groups_are_weight_and_bias() -> None:
    layers = ["encoder.0", "encoder.3", "encoder.7", "encoder.9", "classifier"]
    groups = layer_groups(build("lenet5", input_shape=(1, 28, 28), classes=10))
    assert groups == [[f"{layer}.weight", f"{layer}.bias"] for layer in layers]


def test_resnet20_groups_include_the_batch_norm() -> None:
    groups = layer_groups(build("resnet20", input_shape=(3, 32, 32), classes=10))
    pairs = [("encoder.0", "encoder.1")]
    for block in range(3, 12):
        pairs += [(f"encoder.{block}.residual.{i}", f"encoder.{block}.residual.{i + 1}") for i in (0, 3)]
    expected = [[f"{conv}.weight", f"{norm}.weight", f"{norm}.bias"] for conv, norm in pairs]
    assert groups == [*expected, ["classifier.weight", "classifier.bias"]]
    assert len(groups) == 20


class Foreign(nn.Module):
    """A user's module with what the built-in ones lack."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.first_norm = nn.LayerNorm(8)
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.second_norm = nn.LayerNorm(8)
        self.lstm = nn.LSTM(8, 8)
        self.norm_of_lstm = nn.LayerNorm(8)
        self.up = nn.ConvTranspose2d(4, 6, 3)
        self.up_norm = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(8, 5)
        self.other_size = nn.LayerNorm(8)
        self.plain = nn.Linear(5, 10, bias=False)
        self.no_affine = nn.BatchNorm1d(10, affine=False)
        self.tied = nn.Linear(8, 10)
        self.tied.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_groups_of_a_user_module() -> None:
    module = Foreign()
    groups = layer_groups(module)
    assert groups == [
        ["token"],
        ["first_norm.weight", "first_norm.bias"],
        ["embedding.weight", "norm.weight", "norm.bias"],
        ["second_norm.weight", "second_norm.bias"],
        ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "lstm.bias_hh_l0"],
        ["norm_of_lstm.weight", "norm_of_lstm.bias"],
        ["up.weight", "up.bias", "up_norm.weight", "up_norm.bias"],
        ["hidden.weight", "hidden.bias"],
        ["other_size.weight", "other_size.bias"],
        ["plain.weight"],
        ["tied.bias"],
        ["attention.in_proj_weight", "attention.in_proj_bias"],
        ["attention.out_proj.weight", "attention.out_proj.bias"],
    ]
    assert [name for group in groups for name in group] == names_of(module)


def test_a_single_layer_and_an_empty_module() -> None:
    assert layer_groups(nn.Linear(2, 2)) == [["weight", "bias"]]
    assert layer_groups(nn.ReLU()) == []
