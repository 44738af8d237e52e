"""Compiling loops over arrays. Import this, and what uses it, only when a loop is to run: numba is slow to load."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(signature: Any) -> Callable[[Loop], Loop]:
    """Compile a loop when its module is loaded, and keep the machine code on disk where that is possible."""

    def compile_(loop: Loop) -> Loop:
        try:
            machine_code: Loop = njit(signature, nogil=True, cache=True)(loop)
        except Exception:  # no folder that can be written, a full disk, a damaged file in the cache
            machine_code = njit(signature, nogil=True)(loop)
        return machine_code

    return compile_


def inlined(entry: Loop) -> Loop:
    """A function that compiled loops may call at no cost."""
    compiled_entry: Loop = njit(entry)
    return compiled_entry
