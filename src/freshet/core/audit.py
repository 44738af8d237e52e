"""Compare a logged number with the one that the formulas give."""

import math


class Mismatch(Exception):
    """A logged number does not follow from the others. The text says which."""


def expect(name: str, logged: float, recomputed: float, tolerance: float = 1e-9) -> None:
    """Raise ``Mismatch`` unless the two agree to rounding."""
    if logged != recomputed and not math.isclose(logged, recomputed, rel_tol=tolerance, abs_tol=1e-15):
        raise Mismatch(f"{name} is logged as {logged!r}, the formula gives {recomputed!r}")
