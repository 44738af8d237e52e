"""Regression: a task without classes. Its metric is an error.

python examples/regression.py          (FRESHET_SHORT=1 for a few seconds)
"""

import os

from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale
from torch import nn

import freshet

SHORT = bool(os.environ.get("FRESHET_SHORT"))

x, y = load_diabetes(return_X_y=True)
x, y = scale(x).astype("float32"), scale(y).astype("float32")[:, None]

federation = freshet.Federation(
    model=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)),
    train=(x[:360], y[:360]),
    test=(x[360:], y[360:]),
    devices=12,  # without class labels, samples are split evenly (or by groups=)
    task="regression",
    method="fedasmu",
    training={"lr": 0.02},
    run={"per_round": 4, "eval_every": 20},
)
result = federation.run(until="1m" if SHORT else "8m")
row = result.rows[-1]
print(f"metric {result.metric.name}: {result.values[0]:.3f} -> {result.values[-1]:.3f}")
print(f"mae {row['mae']:.3f}, r2 {row['r2']:.3f}")
