"""What every kind of worker does with a call: hold trainers, compute, and answer with a result or an error.

Keeping freed memory inside the process.

Training allocates and frees the same few hundred kilobytes at every step, and the server a model at every
aggregation; glibc gives such blocks back to the system and faults them in again each time. Telling it to keep them is
worth 15-20 % of a step, and a third of the aggregation of a large model (docs/performance.md).

What a fork server loads before it forks workers: everything that any training needs.
"""

import ctypes
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import cloudpickle
import torch

from freshet.compute.executor import Setup
from freshet.errors import FreshetError, RunError
from freshet.training.trainer import Trainer

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


class Host:
    """Trainers by the number of their setup. Answers are bytes for ``open_answer``; nothing is ever raised."""

    def __init__(self) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self._trainers: dict[int, Trainer] = {}

    def install(self, number: int, drop: Sequence[int], load: Callable[[], Setup]) -> bytes:
        """Build the trainer of a setup, after forgetting those that are not needed any more."""
        for old in drop:
            self._trainers.pop(old, None)

        def build() -> None:
            self._trainers[number] = load().trainer()

        return answer(build)

    def call(self, number: int, request: bytes) -> bytes:
        """Call a trainer's method; the request holds its name and arguments."""

        def compute() -> Any:
            name, arguments = pickle.loads(request)  # noqa: S301  (from our own parent process)
            return getattr(self._trainers[number], name)(*arguments)

        return answer(compute)


def request(name: str, arguments: tuple[Any, ...]) -> bytes:
    """A call as bytes, classes of ``__main__`` included."""
    try:
        content: bytes = cloudpickle.dumps((name, arguments))
    except Exception as error:
        raise RunError(f"a task cannot be sent to a worker: {error}") from error
    return content


def answer(compute: Callable[[], Any]) -> bytes:
    """The result of a computation, or its error in a form that can always be sent."""
    try:
        return pickle.dumps((None, compute()), protocol=5)
    except FreshetError as error:
        return pickle.dumps(((type(error).__name__, error.args, vars(error)), None))
    except BaseException:  # also SystemExit: a user's code must not end the worker
        return pickle.dumps((("", (traceback.format_exc(),), {}), None))


def open_answer(content: bytes) -> Any:
    """The result, or the error raised here: Freshet's own as they were, all others as a ``RunError``."""
    error, result = pickle.loads(content)  # noqa: S301  (from our own worker)
    if error is None:
        return result
    name, arguments, attributes = error
    kinds = {kind.__name__: kind for kind in FreshetError.__subclasses__()}
    if name not in kinds:
        raise RunError(f"training failed in a worker:\n{arguments[0]}")
    same = kinds[name].__new__(kinds[name])
    same.args = arguments
    vars(same).update(attributes)
    raise same
