"""TextCNN: Yoon Kim, "Convolutional Neural Networks for Sentence Classification", EMNLP 2014 (CNN-rand).

Embedding (300), convolutions of widths 3, 4, 5 with 100 filters each, ReLU, max over time, dropout 0.5, dense layer.
Embeddings start uniform in [-0.25, 0.25], as in Kim's code for words without a pretrained vector. Kim's l2 bound on
the weights of the last layer is left out. Parameters with a vocabulary of 20,000 and 2 classes: 6,360,902.

Padding: the embedding of `pad_id` is zero. Only windows that start at a real token enter the maximum; a window that
reaches past the last token sees zeros. So the logits do not depend on the amount of padding, a text shorter than a
filter still has a window, and an empty text has h = 0.

Only the window at a filter's maximum has a gradient. ``MaxOverTime`` uses this: with L windows and F filters, its
backward pass needs F of the forward pass's F L products. A training step is twice as fast.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freshet.errors import ConfigError
from freshet.models.base import BuiltInModel, check_rate, check_whole, check_wholes


class MaxOverTime(torch.autograd.Function):
    """``max_t relu(b + sum_j W_j x_{t+j})`` over the windows t that start at a real token; 0 if there is none."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, real: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Words (text, place, dimension), mask of real words, filters (filter, dimension, j) -> (text, filter)."""
        padded = nn.functional.pad(words, (0, 0, 0, weight.shape[2] - 1))
        windows = nn.functional.conv1d(padded.transpose(1, 2), weight, bias)
        best, at = windows.masked_fill_(~real.unsqueeze(1), -torch.inf).max(dim=2)
        ctx.save_for_backward(padded, weight, at, best > 0)
        return best.relu_()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        """``dW = sum_texts g x_at``, ``dx_at = sum_filters g W``. Each window is contiguous in memory."""
        padded, weight, at, above = ctx.saved_tensors
        g = gradients[0].to(weight.dtype) * above  # autocast gives bfloat16
        (texts, places, size), (filters, _, width) = padded.shape, weight.shape
        first = at + places * torch.arange(texts, device=at.device).unsqueeze(1)
        rows = (first.unsqueeze(2) + torch.arange(width, device=at.device)).flatten()
        flat = padded.view(texts * places, size)
        won = flat.index_select(0, rows).view(texts, filters, width * size)
        d_weight = torch.einsum("tf,tfk->fk", g, won).view(filters, width, size).transpose(1, 2)
        back = g.unsqueeze(2) * weight.transpose(1, 2).reshape(filters, width * size)
        d_words = torch.zeros_like(flat).index_add_(0, rows, back.view(-1, size)).view(texts, places, size)
        return d_words[:, : places - width + 1], None, d_weight, g.sum(0)


class TextCNN(BuiltInModel):
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
        check_whole("model.vocabulary", vocabulary)
        if not 0 <= check_whole("model.pad_id", pad_id, low=0) < vocabulary:
            raise ConfigError("model.pad_id", f"{pad_id} is not in the vocabulary of {vocabulary} tokens")
        check_whole("model.embedding_dim", embedding_dim)
        check_whole("model.filters", filters)
        widths = check_wholes("model.widths", widths)
        if not widths:
            raise ConfigError("model.widths", "at least one filter width is needed")
        self.pad_id = pad_id
        self.embedding = nn.Embedding(vocabulary, embedding_dim, padding_idx=pad_id)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        with torch.no_grad():
            self.embedding.weight[pad_id].zero_()
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding_dim, filters, width) for width in widths)
        self.add_classifier(filters * len(widths), classes, head=head, dropout=check_rate("model.dropout", dropout))

    def encode(self, x: Tensor) -> Tensor:
        real = x != self.pad_id
        words = self.embedding(x) * real.unsqueeze(2)
        maxima: list[Tensor] = [
            MaxOverTime.apply(words, real, conv.weight, conv.bias)  # type: ignore[no-untyped-call]
            for conv in self.convolutions
        ]
        return torch.cat(maxima, dim=1)
