"""The ``freshet`` command. Thin: parse, call, print."""

from freshet.cli.app import main

__all__ = ["main"]
