"""A worker's side of every kind of pool: hold trainers, compute, and answer with a result or an error.

It also holds what a worker process needs before that: preloaded modules, and a glibc that keeps freed memory. Training
allocates and frees the same few hundred kilobytes at every step, and the server a model at every aggregation. By
default glibc returns such blocks to the system and faults them in again each time. Keeping them saves 15-20 % of a
step, and a third of the aggregation of a large model (docs/performance-appendix.md).
"""

import ctypes
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from freshet.errors import FreshetError, RunError
from freshet.training.trainer import Setup, Trainer

if TYPE_CHECKING:
    from freshet.core.compiling import CompiledLoop

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc return what is free now and keep what is freed later. Other C libraries are left alone."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # frees what loading and partitioning the data took
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_MAX, 0)  # allocate large blocks from the heap too


MODULES = ("freshet.compute.host", "freshet.compute.share")
#: Modules with compiled kernels, which are loaded from the cache on disk.
KERNEL_MODULES = ("freshet.core.kernels", "freshet.training.fast.layer_kernels")


class KernelNotCached(BaseException):
    """A kernel is not in the cache. No ``Exception``, so that no handler tries another way."""


def preload_modules() -> None:
    """Load modules and cached kernels. A kernel that is not cached is compiled by the first worker that needs it."""
    for name in MODULES:
        import_module(name)
    loops = [loop for name in KERNEL_MODULES for loop in _loops(name)]
    with forbid_compiling():
        for loop in loops:
            with suppress(KernelNotCached):
                loop.machine_code()


def _loops(name: str) -> "list[CompiledLoop]":
    from freshet.core.compiling import loops_of

    return loops_of(import_module(name))


def compile_kernels() -> int:
    """Compile all loops and cache them on disk, or load those that are there. Returns their number."""
    loops = [loop for name in (*KERNEL_MODULES, "freshet.methods.asmu.step_kernels") for loop in _loops(name)]
    for loop in loops:
        loop.machine_code()
    return len(loops)


@contextmanager
def forbid_compiling() -> Iterator[None]:
    """Raise ``KernelNotCached`` instead of compiling a kernel."""
    from numba.core import event

    class Refusing(event.Listener):
        def on_start(self, event: Any) -> None:
            raise KernelNotCached

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Refusing()):
        yield


class Host:
    """Trainers by the number of their setup. Answers are bytes for ``decode_answer``; no method raises."""

    def __init__(self, place: int = 0) -> None:
        """``place`` numbers the workers of a pool, which share the machine's GPUs."""
        keep_freed_memory()
        self._place = place
        torch.set_num_threads(1)
        self._trainers: dict[int, Trainer] = {}

    def install(self, number: int, drop: Sequence[int], load: Callable[[], Setup]) -> bytes:
        """Build the trainer of a setup, after dropping those no longer needed."""
        for old in drop:
            self._trainers.pop(old, None)

        def build() -> None:
            self._trainers[number] = load().trainer(self._place)

        return encode_answer(build)

    def call(self, number: int, request: bytes) -> bytes:
        """Call a method of a trainer. The request holds its name and arguments."""

        def compute() -> Any:
            name, arguments = pickle.loads(request)  # noqa: S301  (from the parent process)
            return getattr(self._trainers[number], name)(*arguments)

        return encode_answer(compute)


def encode_request(name: str, arguments: tuple[Any, ...]) -> bytes:
    """Serialise a call, including classes of ``__main__``."""
    try:
        content: bytes = cloudpickle.dumps((name, arguments))
    except Exception as error:
        raise RunError(f"a call cannot be sent to a worker: {error}") from error
    return content


def encode_answer(compute: Callable[[], Any]) -> bytes:
    """Serialise the result of a computation, or its error in a form that can always be sent."""
    try:
        return pickle.dumps((None, compute()), protocol=5)
    except FreshetError as error:
        return pickle.dumps(((type(error).__name__, error.args, vars(error)), None))
    except BaseException:  # SystemExit too: a user's code must not end the worker
        return pickle.dumps((("", (traceback.format_exc(),), {}), None))


def decode_answer(content: bytes) -> Any:
    """Return the result or raise the error: Freshet's errors with their own type, all others as ``RunError``."""
    error, result = pickle.loads(content)  # noqa: S301  (from a worker of this process)
    if error is None:
        return result
    name, arguments, attributes = error
    kinds = {kind.__name__: kind for kind in FreshetError.__subclasses__()}
    if name not in kinds:
        raise RunError(f"training failed in a worker:\n{arguments[0]}")
    copy = kinds[name].__new__(kinds[name])
    copy.args = arguments
    vars(copy).update(attributes)
    raise copy
