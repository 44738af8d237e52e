"""A worker process: ``python -m freshet.compute.worker FD`` answers work that comes over an inherited connection.

It is started as a plain child process, not by ``multiprocessing``, so a user's script needs no ``__main__`` guard and
notebooks work. It trusts its parent, which is the only one that holds the other end.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

#: (number of the setup, name of the trainer's method, arguments); or (number, "setup", (stored setup as bytes,)).
Task = tuple[int, str, tuple[Any, ...]]


def main(descriptor: int) -> None:
    """Answer tasks until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    import cloudpickle
    import torch

    from freshet.compute.memory import keep_freed_memory
    from freshet.training.local import Trainer

    keep_freed_memory()
    torch.set_num_threads(1)
    trainers: dict[int, Trainer] = {}
    with Connection(descriptor) as connection:
        while True:
            try:
                number, name, arguments = connection.recv()
            except EOFError:
                return
            try:
                if name == "setup":
                    trainers = {number: cloudpickle.loads(arguments[0]).load().trainer()}
                    answer: tuple[bool, Any] = (True, None)
                else:
                    method: Callable[..., Any] = getattr(trainers[number], name)
                    answer = (True, method(*arguments))
            except Exception:
                answer = (False, traceback.format_exc())
            try:
                connection.send(answer)
            except (BrokenPipeError, ConnectionResetError):
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # skip the slow tear-down of torch
