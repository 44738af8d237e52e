"""A worker process: ``python worker.py FD PATH`` answers calls that come over an inherited connection.

It is started as a plain child process, not by ``multiprocessing``, so a user's script needs no ``__main__`` guard and
notebooks work. It trusts its parent, which is the only one that holds the other end. This file runs on its own:
whatever goes wrong when Freshet is imported is told to the parent.
"""

import json
import os
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freshet.compute.host import Host

#: What a worker says when it is ready for calls.
READY = b"ready"


def main(descriptor: int, path: list[str]) -> None:
    """Answer calls until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    sys.path[:] = path
    threading.Thread(target=_leave_with_parent, args=(descriptor,), daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            from freshet.compute.host import Host

            host = Host()
        except BaseException:
            connection.send_bytes(traceback.format_exc().encode())
            return
        connection.send_bytes(READY)
        try:
            while True:
                connection.send_bytes(_answer(host, connection))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _answer(host: "Host", connection: Connection) -> bytes:
    """Take one call and compute its answer."""
    from freshet.compute.share import assemble, mapped

    number, spans, drop = connection.recv()
    message = connection.recv_bytes()
    if spans is None:
        return host.call(number, message)
    handle = recv_handle(connection)
    try:
        return host.install(number, drop, lambda: assemble(message, mapped(handle, spans)))
    finally:
        os.close(handle)


def _leave_with_parent(descriptor: int) -> None:
    """End this process as soon as the other end is closed or the parent is gone, even in the middle of a training."""
    parent = os.getppid()
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    while not poll.poll(2000) and os.getppid() == parent:  # a fork of the parent may keep the other end open
        pass
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)  # skip the slow tear-down of torch
