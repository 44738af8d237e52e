"""Compile loops over arrays. Import this, and modules that use it, only before a loop runs: numba is slow to load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from numba import njit
from numba.core import event

Loop = TypeVar("Loop", bound=Callable[..., Any])
COMPILING = "compiling loops, once, about 10 s"


def compile_loop(signature: Any) -> Callable[[Loop], Loop]:
    """Compile a loop when its module is loaded, and cache the machine code on disk if possible."""

    def compile_(loop: Loop) -> Loop:
        try:
            machine_code: Loop = njit(signature, nogil=True, cache=True)(loop)
        except Exception:  # a read-only folder, a full disk, a damaged cache file
            machine_code = njit(signature, nogil=True)(loop)
        return machine_code

    return compile_


def inline(entry: Loop) -> Loop:
    """Compile a function that compiled loops call at no cost."""
    compiled_entry: Loop = njit(entry)
    return compiled_entry


class _Announcer(event.Listener):
    """Says once that something is being compiled. Loading cached code does not count."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def on_start(self, event: Any) -> None:
        if self._say is not None:
            self._say(COMPILING)
            self._say = None

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def announce_compiling(say: Callable[[str], None]) -> Iterator[None]:
    """Call ``say`` as soon as a loop must be compiled in this context, since that takes seconds."""
    with event.install_listener("numba:compile", _Announcer(say)):
        yield
