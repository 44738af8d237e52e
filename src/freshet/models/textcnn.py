"""TextCNN: Yoon Kim, "Convolutional Neural Networks for Sentence Classification", EMNLP 2014 (CNN-rand).

Embedding (300), convolutions of widths 3, 4, 5 with 100 filters each, ReLU, max over time, dropout 0.5, dense layer.
Embeddings start uniform in [-0.25, 0.25], as in Kim's code for words without a pretrained vector.

Padding: the embedding of `pad_id` counts as zero and only windows that start at a real token take part in the
maximum; a window that reaches past the last token sees zeros. So the logits do not depend on how much padding follows a
text, a text shorter than a filter still has a window, and an empty text has h = 0. Kim's l2 bound on the weights of
the last layer is left out. Parameters with a vocabulary of 20,000 and 2 classes: 6,360,902.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from freshet.errors import ConfigError
from freshet.models.base import Network
from freshet.models.checks import rate, whole, wholes


class TextCNN(Network):
    """h = the maxima over time of all filters (3 x 100)."""

    def __init__(
        self,
        classes: int,
        vocabulary: int,
        *,
        pad_id: int = 0,
        head: bool = False,
        embedding_dim: int = 300,
        filters: int = 100,
        widths: Sequence[int] = (3, 4, 5),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        whole("model.vocabulary", vocabulary)
        if not 0 <= whole("model.pad_id", pad_id, low=0) < vocabulary:
            raise ConfigError("model.pad_id", f"{pad_id} is not in the vocabulary of {vocabulary} tokens")
        whole("model.embedding_dim", embedding_dim)
        whole("model.filters", filters)
        widths = wholes("model.widths", widths)
        if not widths:
            raise ConfigError("model.widths", "at least one filter width is needed")
        self.pad_id = pad_id
        self.embedding = nn.Embedding(vocabulary, embedding_dim, padding_idx=pad_id)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        with torch.no_grad():
            self.embedding.weight[pad_id].zero_()
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding_dim, filters, width) for width in widths)
        self.finish(filters * len(widths), classes, head=head, dropout=rate("model.dropout", dropout))

    def encode(self, x: Tensor) -> Tensor:
        real = (x != self.pad_id).unsqueeze(1)
        words = self.embedding(x).transpose(1, 2) * real
        maxima = []
        for conv in self.convolutions:
            assert isinstance(conv, nn.Conv1d)
            windows = nn.functional.relu(conv(nn.functional.pad(words, (0, conv.kernel_size[0] - 1))))
            maxima.append(torch.amax(windows * real, dim=2))
        return torch.cat(maxima, dim=1)
