"""Your own network on your own arrays: striped images by 30 people, one device per person.

python examples/own_cnn.py          (FRESHET_SHORT=1 for a few seconds)
"""

import os

import numpy as np
import torch
from torch import nn

import freshet

SHORT = bool(os.environ.get("FRESHET_SHORT"))


def stripes(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw noisy grey images of 16 x 16 pixels with stripes in one of four directions."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, samples)
    angle = y[:, None, None] * np.pi / 4
    rows, columns = np.mgrid[0:16, 0:16]
    phase = rng.uniform(0, 2 * np.pi, (samples, 1, 1))
    waves = np.sin(np.cos(angle) * columns + np.sin(angle) * rows + phase)
    return (waves + rng.normal(0, 0.8, waves.shape)).astype("float32")[:, None], y


def build() -> nn.Module:
    """Return any module. Freshet calls this whenever it needs a new one."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 4),
    )


x, y = stripes(1500, seed=0)
person = np.random.default_rng(1).integers(0, 30, len(y))  # who made each image

federation = freshet.Federation(
    model=build,
    train=(x, y),
    test=stripes(500, seed=2),
    groups=person,  # one device per person
    method="fedasmu",
    training={"lr": 0.05, "epochs": 3},
    run={"eval_every": 20},
)
result = federation.run(until="1m" if SHORT else "8m")
print(f"accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}, run directory {result.directory}")

model = result.module()
print("first image shows direction", int(model(torch.from_numpy(x[:1])).argmax()), "and should show", y[0])
