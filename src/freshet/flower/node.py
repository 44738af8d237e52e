"""A SuperNode that exits when it stops working, and whose local port is closed to other users.

    python -m freshet.flower.node [options of flower-supernode]

If a connection breaks during a TLS handshake, Flower 1.41 stops working but does not exit: a thread keeps the process
alive. This wrapper exits instead, so that a supervisor can restart it.
"""

import os
import sys
import traceback

from freshet.flower.local_port import close_to_other_users


def main() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    close_to_other_users()
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
