"""The built-in networks: exact sizes, one step of learning, features and classify, masks, norms."""

import pytest
import torch
from torch import Tensor, nn

from freshet.models import BuiltInModel, build, count_parameters, has_features, names

CIFAR, MNIST, TINY, DIGITS = (3, 32, 32), (1, 28, 28), (3, 64, 64), (1, 8, 8)
VOCABULARY = 50
IMAGE_NETWORKS = ["lenet5", "cnn", "resnet20", "alexnet", "vgg11", "mlp", "digits"]
CLASSIFIERS = [name for name in names() if name != "charlstm"]  # that one predicts at every character


def small(name: str, **settings: object) -> BuiltInModel:
    """Build a network at its smallest sensible input."""
    torch.manual_seed(0)
    if name == "textcnn":
        settings = {"embedding_dim": 16, **settings}
        return build(name, input_shape=(12,), classes=4, vocabulary=VOCABULARY, pad_id=0, **settings)
    return build(name, input_shape=DIGITS if name in ("digits", "mlp") else CIFAR, classes=4, **settings)


def batch(name: str, size: int = 8) -> tuple[Tensor, Tensor]:
    """A fixed batch for `small(name)`."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(size) % 4
    if name == "textcnn":
        return torch.randint(1, VOCABULARY, (size, 12), generator=generator), labels
    shape = DIGITS if name in ("digits", "mlp") else CIFAR
    return torch.randn(size, *shape, generator=generator), labels


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "parameters"),
    [
        ("lenet5", MNIST, 10, {}, 61_706),  # padding 2 in the first convolution; the classical figure
        ("lenet5", CIFAR, 10, {}, 62_006),  # the classical figure with 3 channels
        ("lenet5", CIFAR, 100, {}, 62_006 + 90 * 85),
        ("cnn", CIFAR, 10, {}, 832 + 8_224 + 28_800 * 10 + 10),
        ("cnn", CIFAR, 100, {}, 832 + 8_224 + 28_800 * 100 + 100),
        ("cnn", CIFAR, 10, {"pool": True}, 832 + 8_224 + 1_568 * 10 + 10),
        ("resnet20", CIFAR, 10, {}, 269_722),  # He et al. 2016: 0.27 M
        ("resnet20", CIFAR, 10, {"norm": "group"}, 269_722),
        ("resnet20", CIFAR, 100, {}, 269_722 + 90 * 65),
        ("resnet20", TINY, 200, {}, 269_722 + 190 * 65),
        ("alexnet", CIFAR, 10, {}, 2_472_266),  # the common CIFAR form: 2.47 M
        ("alexnet", CIFAR, 100, {}, 2_472_266 + 90 * 257),
        ("vgg11", CIFAR, 10, {}, 9_750_922),  # classifier 512-512-10, the published figure of that form
        ("vgg11", CIFAR, 10, {"norm": "batch"}, 9_756_426),
        ("vgg11", CIFAR, 10, {"norm": "batch", "hidden_layers": 0}, 9_231_114),  # the form with one dense layer
        ("vgg11", CIFAR, 100, {}, 9_750_922 + 90 * 513),
        ("mlp", DIGITS, 10, {}, 65 * 64 + 65 * 10),
        ("mlp", DIGITS, 10, {"hidden": []}, 65 * 10),
        ("mlp", (20,), 3, {"hidden": [8, 4]}, 21 * 8 + 9 * 4 + 5 * 3),
        ("digits", DIGITS, 10, {}, 13_706),
    ],
)
def test_parameter_counts(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, object], parameters: int
) -> None:
    with torch.device("meta"):
        assert count_parameters(build(name, input_shape=shape, classes=classes, **options)) == parameters


def test_parameter_count_of_textcnn() -> None:
    network = build("textcnn", input_shape=(256,), classes=2, vocabulary=20_000)
    filters = sum(100 * (300 * width + 1) for width in (3, 4, 5))
    assert count_parameters(network) == 20_000 * 300 + filters + 301 * 2 == 6_360_902


@pytest.mark.parametrize(
    ("name", "classes", "added"),
    [
        ("lenet5", 10, 30_620),
        ("resnet20", 10, 22_720),
        ("alexnet", 10, 131_584),
        ("vgg11", 10, 391_424),
        ("textcnn", 4, 167_180),
        ("digits", 10, 22_720),
    ],
)
def test_moon_head_adds_the_known_number_of_parameters(name: str, classes: int, added: int) -> None:
    text = name == "textcnn"
    counts = []
    with torch.device("meta"):
        for head in (False, True):
            network = build(
                name,
                input_shape=(12,) if text else CIFAR,
                classes=classes,
                head=head,
                vocabulary=VOCABULARY if text else None,
            )
            counts.append(count_parameters(network))
    assert counts[1] - counts[0] == added


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", [n for n in CLASSIFIERS if n != "cnn"])
def test_one_step_lowers_the_loss(name: str, head: bool) -> None:
    check_one_step(small(name, head=head), name)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["lenet5", "cnn", "resnet20", "alexnet", "vgg11", "digits"])
def test_one_step_lowers_the_loss_with_norm(name: str, norm: str) -> None:
    check_one_step(small(name, norm=norm), name)


@pytest.mark.parametrize("settings", [{}, {"pool": True}, {"pool": True, "head": True}])
def test_one_step_lowers_the_loss_of_the_cnn(settings: dict[str, object]) -> None:
    check_one_step(small("cnn", **settings), "cnn")


def check_one_step(network: BuiltInModel, name: str) -> None:
    """One plain SGD step on a fixed batch; dropout off so that both losses are of the same function."""
    x, y = batch(name)
    network.train()
    for layer in network.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    optimiser = torch.optim.SGD(network.parameters(), lr=0.001)
    before = nn.functional.cross_entropy(network(x), y)
    before.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
    optimiser.step()
    assert nn.functional.cross_entropy(network(x), y) < before


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", [n for n in CLASSIFIERS if n != "cnn"])
def test_forward_is_classify_of_features(name: str, head: bool) -> None:
    network = small(name, head=head)
    assert has_features(network)
    x, _ = batch(name)
    for mode in (True, False):
        network.train(mode)
        torch.manual_seed(3)
        logits = network(x)
        torch.manual_seed(3)
        z = network.features(x)
        assert torch.equal(logits, network.classify(z))
        assert logits.shape == (8, 4)
        assert z.shape == (8, 256) if head else z.shape == (8, network.classifier.in_features)
    assert torch.equal(network(x), network(x))  # eval mode is deterministic


def test_cnn_features_are_the_flattened_map() -> None:
    network = small("cnn")
    x, _ = batch("cnn")
    assert network.features(x).shape == (8, 28_800)
    assert torch.equal(network(x), network.classify(network.features(x)))


@pytest.mark.parametrize("name", ["vgg11", "textcnn"])
def test_features_come_before_the_last_dropout(name: str) -> None:
    network = small(name).train()
    x, _ = batch(name)
    z = network.features(x).detach()
    assert not torch.equal(network.classify(z), network.classify(z))
    if name == "textcnn":
        assert torch.equal(network.features(x), network.features(x))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_small_batches_keep_their_shape(name: str, size: int) -> None:
    x, _ = batch(name, size)
    assert small(name).eval()(x).shape == (size, 4)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (3, 64, 64), (3, 32, 48)])
@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_every_image_network_takes_the_usual_shapes(name: str, shape: tuple[int, int, int]) -> None:
    network = build(name, input_shape=shape, classes=7).eval()
    with torch.no_grad():
        assert network(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["lenet5", "cnn", "resnet20", "alexnet", "vgg11", "digits"])
def test_group_norm_has_no_buffers_and_two_groups(name: str) -> None:
    network = small(name, norm="group")
    norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm)]
    assert norms
    assert all(m.num_groups == 2 for m in norms)
    assert not list(network.buffers())
    assert list(small(name, norm="batch").buffers())


def test_digits_has_neither_buffers_nor_dropout() -> None:
    network = small("digits")
    assert not list(network.buffers())
    assert not [m for m in network.modules() if isinstance(m, nn.Dropout)]
    assert count_parameters(network) < 20_000


def test_resnet20_shortcut_is_option_a() -> None:
    network = small("resnet20")
    block = network.get_submodule("encoder.6")
    x = torch.randn(2, 16, 5, 5)
    y = block.shortcut(x)  # type: ignore[operator]
    assert y.shape == (2, 32, 3, 3)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


@pytest.mark.parametrize("head", [False, True])
def test_textcnn_ignores_the_padding(head: bool) -> None:
    network = small("textcnn", head=head).eval()
    with torch.no_grad():
        network.get_parameter("embedding.weight")[0] = 5.0  # even a damaged padding row must not leak
    texts = torch.randint(1, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(2))
    for words in (1, 2, 3, 5, 7):
        plain = network(texts[:, :words])
        for tail in (1, 4, 30):
            padded = torch.cat([texts[:, :words], torch.zeros(6, tail, dtype=torch.long)], dim=1)
            torch.testing.assert_close(network(padded), plain, rtol=1e-5, atol=1e-6)


def test_textcnn_keeps_texts_of_a_batch_apart() -> None:
    network = small("textcnn").eval()
    texts = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
    texts[0, 3:] = 0
    torch.testing.assert_close(network(texts)[:1], network(texts[:1, :3]), rtol=1e-5, atol=1e-6)


def plainly(network: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    """Compute the features of TextCNN plainly: every window, with the gradients of autograd."""
    real = (texts != 0).unsqueeze(1)
    words = network.embedding(texts).transpose(1, 2) * real  # type: ignore[operator]
    maxima = []
    for conv in network.convolutions:  # type: ignore[union-attr]
        windows = torch.relu(conv(nn.functional.pad(words, (0, conv.kernel_size[0] - 1))))
        maxima.append((windows * real).amax(dim=2))
    return torch.cat(maxima, dim=1)


def test_textcnn_has_the_features_and_gradients_of_the_plain_formulation() -> None:
    """Texts of all lengths, an empty text, and a repeated word (all its windows are at the maximum)."""
    network = small("textcnn").double()
    texts = torch.randint(1, VOCABULARY, (14, 12), generator=torch.Generator().manual_seed(3))
    for length in range(13):
        texts[length, length:] = 0
    texts[13] = 7
    weights = torch.randn(network.features(texts).shape, generator=torch.Generator().manual_seed(4)).double()
    found = []
    for features in (network.features, lambda given: plainly(network, given)):
        network.zero_grad()
        (features(texts) * weights).sum().backward()
        found.append([features(texts), *(p.grad for p in network.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == 8  # features, embedding, three filters with their biases
    for ours, plain in zip(*found, strict=True):
        assert plain.any()
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


def test_textcnn_accepts_an_empty_text_and_its_gradient_is_finite() -> None:
    network = small("textcnn")
    texts = torch.zeros(2, 12, dtype=torch.long)
    assert not network.features(texts).any()
    network(texts).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_textcnn_never_trains_the_padding_row() -> None:
    network = small("textcnn")
    texts = torch.randint(1, VOCABULARY, (4, 12))
    texts[:, 6:] = 0
    network(texts).sum().backward()
    gradient = network.get_parameter("embedding.weight").grad
    assert gradient is not None
    assert not gradient[0].any()


def test_textcnn_embeddings_start_small_and_the_padding_row_at_zero() -> None:
    weight = build("textcnn", input_shape=(9,), classes=2, vocabulary=VOCABULARY, pad_id=3).get_parameter(
        "embedding.weight"
    )
    assert not weight[3].any()
    assert 0.2 < weight.abs().max() <= 0.25


def test_same_seed_same_weights() -> None:
    for name in CLASSIFIERS:
        first, second = small(name).state_dict(), small(name).state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
