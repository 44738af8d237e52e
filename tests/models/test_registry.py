"""Building networks by name, and the error of each mistake."""

import pytest
import torch
from torch import nn

from freshet.errors import ConfigError
from freshet.models import build, describe, has_features, names

IMAGE = {"input_shape": (3, 32, 32), "classes": 10}


def test_names_and_descriptions_agree() -> None:
    assert set(names()) == {"lenet5", "cnn", "resnet20", "alexnet", "vgg11", "textcnn", "charlstm", "mlp", "digits"}
    rows = {row.name: row for row in describe()}
    assert list(rows) == names()
    assert rows["resnet20"].parameters == 269_722
    assert rows["resnet20"].norms == ("batch", "group")
    assert rows["vgg11"].options == {"hidden_layers": 2, "dropout": 0.5}


@pytest.mark.parametrize("name", ["lenet", "", "ResNet20", None, ["lenet5"]])
def test_unknown_name(name: object) -> None:
    with pytest.raises(ConfigError, match=r"^model\.name: .* is not known; choose one of lenet5, cnn, ") as caught:
        build(name, **IMAGE)  # type: ignore[arg-type]
    assert caught.value.key == "model.name"


@pytest.mark.parametrize(
    ("name", "settings", "key", "words"),
    [
        ("textcnn", IMAGE, "model.name", "token ids"),
        ("textcnn", {"input_shape": (9,), "classes": 2}, "model.name", "vocabulary"),
        ("lenet5", {"input_shape": (9,), "classes": 2, "vocabulary": 30}, "model.name", "choose one of textcnn"),
        ("lenet5", {"input_shape": (20,), "classes": 2}, "model.name", "images"),
        ("lenet5", {"input_shape": (1, 8, 8), "classes": 2}, "model.name", "at least 12x12"),
        ("vgg11", {"input_shape": (1, 8, 8), "classes": 2}, "model.name", "at least 16x16"),
        ("resnet20", {**IMAGE, "norm": "none"}, "model.norm", "choose one of batch, group"),
        ("mlp", {**IMAGE, "norm": "batch"}, "model.norm", "not possible for mlp"),
        ("lenet5", {**IMAGE, "norm": "layer"}, "model.norm", "choose one of batch, group, none"),
        ("cnn", {**IMAGE, "head": True}, "model.head", "829 million"),
        ("lenet5", {**IMAGE, "head": "yes"}, "model.head", "true or false"),
        ("lenet5", {**IMAGE, "pool": True}, "model.pool", "no options"),
        ("vgg11", {**IMAGE, "pool": True}, "model.pool", "hidden_layers, dropout"),
        ("vgg11", {**IMAGE, "dropout": 1.0}, "model.dropout", "in [0, 1)"),
        ("vgg11", {**IMAGE, "hidden_layers": -1}, "model.hidden_layers", "at least 0"),
        ("cnn", {**IMAGE, "pool": 1}, "model.pool", "true or false"),
        ("mlp", {**IMAGE, "hidden": [0]}, "model.hidden", "at least 1"),
        ("mlp", {**IMAGE, "hidden": "64"}, "model.hidden", "list"),
        ("lenet5", {"input_shape": (3, 32, 32), "classes": 0}, "model.classes", "at least 1"),
        ("lenet5", {"input_shape": (3, 0, 32), "classes": 2}, "model.input_shape", "at least 1"),
        ("textcnn", {"input_shape": (9,), "classes": 2, "vocabulary": 5, "pad_id": 5}, "model.pad_id", "vocabulary"),
        ("textcnn", {"input_shape": (9,), "classes": 2, "vocabulary": 5, "widths": []}, "model.widths", "at least one"),
    ],
)
def test_impossible_settings_name_the_key(name: str, settings: dict[str, object], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, **settings)  # type: ignore[arg-type]
    assert caught.value.key == key
    assert words in str(caught.value)


def test_the_smallest_allowed_images_work() -> None:
    for name, side in (("lenet5", 12), ("cnn", 8), ("resnet20", 8), ("alexnet", 17), ("vgg11", 16), ("digits", 4)):
        network = build(name, input_shape=(1, side, side), classes=3).eval()
        assert network(torch.zeros(1, 1, side, side)).shape == (1, 3)


def test_a_plain_module_has_no_features() -> None:
    assert not has_features(nn.Linear(2, 2))
    assert has_features(build("digits", input_shape=(1, 8, 8), classes=10))
