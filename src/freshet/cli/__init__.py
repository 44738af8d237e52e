"""The ``freshet`` command. Thin: parse, call, print."""

import sys
from io import TextIOWrapper
from typing import TextIO


def main() -> None:
    """Run the command. Imports happen here, so that Ctrl-C while loading ends it without a traceback."""
    replace_unprintable(sys.stdout, sys.stderr)
    try:
        from freshet.cli.util import exit_on_interrupt

        with exit_on_interrupt():
            if _needs_workers(sys.argv[1:]):
                from freshet.compute.fork_server import start_early

                start_early()  # the workers load their libraries while this process loads its own
            from freshet.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except SystemExit as end:
        cause = getattr(end.__context__, "__cause__", None)
        if isinstance(cause, KeyboardInterrupt):  # typer exits silently
            sys.stderr.write("interrupted\n")
        raise


def replace_unprintable(*streams: TextIO | None) -> None:
    """Print a question mark for a character that the terminal's encoding lacks, instead of failing."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _needs_workers(arguments: list[str]) -> bool:
    """Return whether a command surely starts worker processes, before parsing its arguments."""
    return arguments[:1] in (["run"], ["resume"]) and "--executor processes" in " ".join(arguments).replace("=", " ")
