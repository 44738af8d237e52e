"""Loading the libraries that a command needs."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """For imports: without the garbage collector, which finds nothing then and takes a tenth of the time; what they
    have made is not looked at later, either. Ctrl-C ends them at once."""
    gc.disable()
    try:
        with at_once():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def at_once() -> Iterator[None]:
    """Ctrl-C in here ends the process: as an exception it may get lost in a library that is being loaded."""

    def leave(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    usual = threading.current_thread() is threading.main_thread()
    usual = usual and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
