"""The character model against equations written out, and what a prediction may depend on."""

import pytest
import torch

from freshet.models import build
from freshet.models.charlstm import CharLSTM


def test_one_layer_equals_the_equations() -> None:
    torch.manual_seed(1)
    network = CharLSTM(7, 5, embedding_dim=3, units=4).double()
    ids = torch.tensor([[0, 4, 2, 2], [1, 1, 3, 0]])
    lstm, h, c, outputs = network.lstm, torch.zeros(2, 4).double(), torch.zeros(2, 4).double(), []
    for t in range(ids.shape[1]):
        e = network.embedding.weight[ids[:, t]]
        gates = e @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
        i, f, g, o = gates.split(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h @ network.classifier.weight.T + network.classifier.bias)
    torch.testing.assert_close(network(ids), torch.stack(outputs, dim=1))


def test_a_prediction_sees_no_later_character() -> None:
    network = build("charlstm", input_shape=(6,), classes=5, vocabulary=5, units=4, layers=2).eval()
    ids = torch.tensor([[0, 1, 2, 3, 4, 0]])
    other = ids.clone()
    other[0, 4:] = 2
    a, b = network(ids), network(other)
    torch.testing.assert_close(a[:, :4], b[:, :4], rtol=0, atol=0)
    assert not torch.equal(a[:, 4:], b[:, 4:])


def test_the_network_of_mcmahan() -> None:
    options = {"embedding_dim": 8, "units": 256, "layers": 2}
    network = build("charlstm", input_shape=(80,), classes=65, vocabulary=65, **options)  # type: ignore[arg-type]
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert sum(p.numel() for p in network.parameters()) == 65 * 8 + lstm + 257 * 65


@pytest.mark.parametrize("head", [False, True])
def test_one_step_lowers_the_loss_and_forward_is_classify_of_features(head: bool) -> None:
    torch.manual_seed(0)
    network = build("charlstm", input_shape=(6,), classes=5, vocabulary=5, units=8, head=head)
    ids = torch.randint(5, (4, 7))
    x, y = ids[:, :-1], ids[:, 1:]

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(network(x).transpose(1, 2), y)

    before = loss()
    before.backward()
    with torch.no_grad():
        for parameter in network.parameters():
            assert parameter.grad is not None and parameter.grad.any()
            parameter -= 0.1 * parameter.grad
    assert loss() < before
    assert torch.equal(network(x), network.classify(network.features(x)))
