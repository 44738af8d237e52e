"""Folders that commands write to."""

import os
from pathlib import Path

from freshet.errors import ConfigError


def writable(folder: Path) -> Path:
    """The folder, made if it is not there yet; one sentence if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError("--out", f"{folder} cannot be written ({problem}); choose another folder")
    return folder


def fresh(folder: Path) -> Path:
    """The folder, or one beside it with a number when it is taken."""
    names = (folder if n == 0 else folder.with_name(f"{folder.name}-{n + 1}") for n in range(10_000))
    return next(name for name in names if not name.exists())
