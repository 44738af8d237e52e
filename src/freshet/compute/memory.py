"""Keeping freed memory inside the process.

Training allocates and frees the same few hundred kilobytes at every step; glibc gives such blocks back to the system
and faults them in again each time. Telling it to keep them is worth 15-20 % of a step (docs/performance.md).
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The second is the largest that glibc takes; beyond it the call is ignored.
_TRIM, _MMAP = 1 << 30, 1 << 25


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _TRIM)
        mallopt(_M_MMAP_THRESHOLD, _MMAP)
