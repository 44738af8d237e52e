"""What a fork server loads before it forks workers: everything that any training needs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

MODULES = ("freshet.compute.host", "freshet.compute.share")
#: Modules with compiled loops, which are loaded from disk.
LOOPS = ("freshet.core.kernels", "freshet.training.convolving_kernels", "freshet.training.pooling_kernels")


class NotOnDisk(BaseException):
    """A loop has never been compiled on this machine (no ``Exception``: nobody is to try another way)."""


def load() -> None:
    """Load modules, and loops as far as they are on disk; those that are not are compiled by whoever needs them."""
    for name in MODULES:
        import_module(name)
    with _never_compiling():
        for name in LOOPS:
            with suppress(NotOnDisk):
                import_module(name)


@contextmanager
def _never_compiling() -> Iterator[None]:
    """Raise ``NotOnDisk`` in here instead of compiling a loop."""
    from numba.core import event

    class Refusing(event.Listener):
        def on_start(self, event: Any) -> None:
            raise NotOnDisk

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Refusing()):
        yield
