"""Keeping freed memory inside the process.

Training allocates and frees the same few hundred kilobytes at every step, and the server a model at every
aggregation; glibc gives such blocks back to the system and faults them in again each time. Telling it to keep them is
worth 15-20 % of a step, and a third of the aggregation of a large model (docs/performance.md).
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_MMAP_MAX, 0)  # large blocks, too, come from the heap
