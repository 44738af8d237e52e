"""Keeping freed memory inside the process.

Training allocates and frees the same few hundred kilobytes at every step, and the server a model at every
aggregation; glibc gives such blocks back to the system and faults them in again each time. Telling it to keep them is
worth 15-20 % of a step, and a third of the aggregation of a large model (docs/performance.md).
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks from now on, and to give back what was freed before; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # what was needed to load and deal the data is not needed again
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_MAX, 0)  # large blocks, too, come from the heap
