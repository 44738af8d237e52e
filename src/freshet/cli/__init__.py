"""The ``freshet`` command. Thin: parse, call, print."""

import sys


def main() -> None:
    """Run the command. What it needs is loaded here, so that Ctrl-C while loading ends it without a traceback."""
    try:
        from freshet.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
