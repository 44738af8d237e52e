"""Compile loops over arrays. Import this, and modules that use it, only before a loop runs: numba is slow to load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import event

Loop = TypeVar("Loop", bound=Callable[..., Any])
COMPILING = "compiling loops, once, about 10 s"


class CompiledLoop:
    """A loop that is compiled at its first call, or loaded from the cache on disk if it is there.

    A run then compiles only the loops that it needs. From the first call on, the machine code stands in the loop's
    module in place of this object.
    """

    def __init__(self, loop: Callable[..., Any], signature: Any) -> None:
        self.loop, self._signature = loop, signature
        self._machine_code: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return self.machine_code()(*arguments)

    def machine_code(self) -> Callable[..., Any]:
        """The compiled loop."""
        if self._machine_code is None:
            scope = self.loop.__globals__
            for called in (scope.get(name) for name in self.loop.__code__.co_names):
                if isinstance(called, CompiledLoop):
                    called.machine_code()
            with _with_listener():
                self._machine_code = self._compile()
            if scope.get(self.loop.__name__) is self:
                scope[self.loop.__name__] = self._machine_code
        return self._machine_code

    def _compile(self) -> Callable[..., Any]:
        try:
            found: Callable[..., Any] = njit(self._signature, nogil=True, cache=True)(self.loop)
        except Exception:  # a read-only folder, a full disk, a damaged cache file
            found = njit(self._signature, nogil=True)(self.loop)
        return found


def compile_loop(signature: Any) -> Callable[[Loop], Loop]:
    """Compile a loop when it is first called, and cache the machine code on disk if possible."""

    def declare(loop: Loop) -> Loop:
        return cast(Loop, CompiledLoop(loop, signature))

    return declare


def loops_of(module: ModuleType) -> list[CompiledLoop]:
    """The loops of a module that were not called yet."""
    return [value for value in vars(module).values() if isinstance(value, CompiledLoop)]


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


#: Who is told that a loop is being compiled.
_listeners: list[_Announcer] = []


def tell_of_compiling(say: Callable[[str], None] | None) -> None:
    """Call ``say`` once, when the next loop must be compiled; None: call nobody."""
    _listeners[:] = [] if say is None else [_Announcer(say)]


@contextmanager
def _with_listener() -> Iterator[None]:
    if not _listeners:
        yield
        return
    with event.install_listener("numba:compile", _listeners[0]):
        yield
