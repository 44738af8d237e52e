"""Compiling loops over arrays. Import this, and what uses it, only when a loop is to run: numba is slow to load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from numba import njit
from numba.core import event

Loop = TypeVar("Loop", bound=Callable[..., Any])
COMPILING = "compiling loops, once, about 10 s"


def compile_loop(signature: Any) -> Callable[[Loop], Loop]:
    """Compile a loop when its module is loaded, and keep the machine code on disk where that is possible."""

    def compile_(loop: Loop) -> Loop:
        try:
            machine_code: Loop = njit(signature, nogil=True, cache=True)(loop)
        except Exception:  # no folder that can be written, a full disk, a damaged file in the cache
            machine_code = njit(signature, nogil=True)(loop)
        return machine_code

    return compile_


def inline(entry: Loop) -> Loop:
    """A function that compiled loops may call at no cost."""
    compiled_entry: Loop = njit(entry)
    return compiled_entry


class _Announcer(event.Listener):
    """Says once that something is being compiled (what is found on disk is not)."""

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
    """Say it as soon as a loop has to be compiled in here, since that takes a while."""
    with event.install_listener("numba:compile", _Announcer(say)):
        yield
