"""Python's garbage collector while a run goes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patient_collector() -> Iterator[None]:
    """Let Python look for garbage less often: with many devices in flight each look is long, and there is little."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
