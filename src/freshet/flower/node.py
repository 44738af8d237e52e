"""A SuperNode that ends when it no longer works.

    python -m freshet.flower.node [options of flower-supernode]

Flower 1.41 gives up when a connection breaks during a TLS handshake, and then neither works nor ends: a thread of its
own keeps the process. Whoever watches over the process should see it end, and start it again.
"""

import os
import sys
import traceback


def main() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

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
