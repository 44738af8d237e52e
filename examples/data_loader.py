"""DataLoaders as they are: one per device, with a collate_fn that pads sequences of different lengths.

python examples/data_loader.py          (FRESHET_SHORT=1 for a few seconds)
"""

import os

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import freshet


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(50, 16, mode="sum", padding_idx=0), nn.Linear(16, 3)

    def forward(self, ids, lengths):
        return self.head(self.words(ids) / lengths[:, None])


def sequences(count: int, seed: int) -> list:
    """Pairs of a sequence of 3 to 12 tokens and its class. Tokens of class c are 1 + c, 4 + c and so on."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=draw).tolist()
    lengths = torch.randint(3, 13, (count,), generator=draw).tolist()
    return [(1 + c + 3 * torch.randint(16, (n,), generator=draw), c) for c, n in zip(labels, lengths, strict=True)]


def collate(samples):
    rows, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return (pad_sequence(rows, batch_first=True), lengths), torch.tensor(labels)


def federation(method="fedasmu", devices=10):
    loaders = [DataLoader(sequences(60, seed), 8, shuffle=True, collate_fn=collate) for seed in range(devices)]
    test = DataLoader(sequences(100, 99), collate_fn=collate)
    return freshet.Federation(Reader, loaders, test, method=method, training={"lr": 0.5}, run={"eval_every": 20})


if __name__ == "__main__":
    until = 60 if os.environ.get("FRESHET_SHORT") else 300
    for method in ("fedasmu", "fedbuff", "fedavg"):
        result = federation(method).run(until=until)
        print(f"{method}: accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")
