"""A SuperNode that answers quickly, exits when it stops working, and whose local port is closed to other users.

    python -m freshet.flower.node [options of flower-supernode]

If a connection breaks during a TLS handshake, Flower 1.41 stops working but does not exit: a thread keeps the process
alive. This wrapper exits instead, so that a supervisor can restart it. It also exits with its supervisor.
"""

import os
import sys
import time
import traceback
from typing import Any

from freshet.flower.local_port import close_to_other_users
from freshet.flower.warm import PARENT, exit_with_parent, pause_seconds

#: Flower's pauses in seconds: without a message, and until the next look for the answer of a task.
FLOWERS_IDLE, FLOWERS_LOOK = 3.0, 0.5
#: Ours. Without a message it is a quarter of the time since the last one, so that a long wait costs the server little.
SHORTEST_IDLE, LOOK = 0.2, 0.05


class NodePauses:
    """The module ``time``, with shorter pauses in the loop of a SuperNode."""

    def __init__(self) -> None:
        self._idle_since: float | None = None

    def sleep(self, seconds: float) -> None:
        if seconds < FLOWERS_IDLE:  # a task is worked on
            self._idle_since = None
            time.sleep(LOOK if seconds == FLOWERS_LOOK else seconds)
            return
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        time.sleep(pause_seconds(now - self._idle_since, SHORTEST_IDLE, FLOWERS_IDLE))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    import flwr.supernode.start_client_internal as flowers_loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    close_to_other_users()
    loop: Any = flowers_loop
    loop.time = NodePauses()
    if parent := int(os.environ.get(PARENT, 0)):
        exit_with_parent(parent)
    code: int | str | None = 1
    try:
        flower_supernode()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
