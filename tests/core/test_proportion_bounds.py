"""The gate of proportion with a factor beyond all use: nothing is refused, and nothing overflows."""

import numpy as np

from freshet.core.admission import MIN_LENGTHS, NormGate
from freshet.core.layout import Layout


def test_a_factor_whose_square_is_no_float_lets_everything_through():
    gate = NormGate(1e300, Layout.build([("w", (2,), "learnable"), ("b", (2,), "buffer")]))
    for _ in range(MIN_LENGTHS + 1):
        lengths = [1e38, 1e38, 5.0]
        assert gate.find_excess(lengths, np.ones(4, np.float32), 5) is None
        gate.remember(lengths)
