"""Trace a real run and count the files that one trip passes through.

    python scripts/walk.py            the files, in the order in which they are entered, and the functions per file
    python scripts/walk.py --counts   one line of counts

The run is ``freshet run`` on the embedded digits, in this process: one trip of FedASMU with a fresh model, from the
command line to the summary. The same run is made once before, so that imports do not count.
"""

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = str(Path(__file__).parent.parent / "src" / "freshet")
COMMAND = ["run", "-m", "fedasmu", "--until", "40", "--seed", "1", "--executor", "serial", "-q"]
#: Docs promise that a reader follows one trip through no more files than these.
MOST_FILES = 75
SMALL = ["data.train_samples=300", "fleet.devices=12", "run.per_round=4", "method.slot=h3"]


def trace(arguments: list[str]) -> dict[str, set[str]]:
    """Functions that run outside imports, by file, in the order of the files' first function."""
    seen: dict[str, set[str]] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name != "<module>":
            seen.setdefault(code.co_filename.removeprefix(SOURCE + "/"), set()).add(code.co_qualname)

    sys.setprofile(profile)
    try:
        freshet(arguments)
    finally:
        sys.setprofile(None)
    return seen


def freshet(arguments: list[str]) -> None:
    """Run the command in this process."""
    from freshet.cli.app import main

    sys.argv = ["freshet", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def main(counts_only: bool) -> int:
    settings = [word for setting in SMALL for word in ("-s", setting)]
    with tempfile.TemporaryDirectory() as folder:
        freshet([*COMMAND, *settings, "-o", f"{folder}/first"])  # imports and compiles everything
        seen = trace([*COMMAND, *settings, "-o", f"{folder}/run"])
    if not counts_only:
        for name, functions in seen.items():
            print(f"{len(functions):4}  {name}")
    print(f"one trip: {len(seen)} files, {sum(map(len, seen.values()))} functions")
    return 0 if len(seen) <= MOST_FILES else 1


if __name__ == "__main__":
    sys.exit(main("--counts" in sys.argv[1:]))
