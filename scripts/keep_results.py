"""Turn the run directories below a folder of results into kept runs, and show that nothing is lost.

    python scripts/keep_results.py results

A cell is a folder with ``runs``, ``suites`` or ``unfinished``. Its run directories become lines of its ``runs.jsonl``
and ``worlds.jsonl``. Each kept run is restored and compared with its directory, byte for byte, before that directory is
removed. A directory with other files than the four that are kept, or one that differs, stays, and the script exits
with 1. Run it again after new directories were added.
"""

import shutil
import sys
from pathlib import Path

from freshet.runs.kept_runs import KEPT_FILES, KeptRun, keep, kept_runs, restore_files
from freshet.runs.reader import RunDirectory, is_run

INSIDE = ("runs", "suites", "unfinished")


def cells(results: Path) -> list[Path]:
    """The folders that keep runs: those with at least one of the folders above."""
    return sorted({path.parent for name in INSIDE for path in results.rglob(name) if "suites" not in path.parent.parts})


def differences(kept: KeptRun, directory: Path) -> list[str]:
    """Names of files that the kept run does not restore byte for byte."""
    restored = restore_files(kept)
    present = {path.name: path.read_bytes() for path in directory.iterdir()}
    return sorted(name for name in {*KEPT_FILES, *present} if restored.get(name) != present.get(name))


def keep_cell(cell: Path) -> tuple[int, list[str]]:
    """Keep the run directories of a cell; return how many, and what is wrong with others."""
    found = sorted(path.parent for name in INSIDE for path in (cell / name).rglob("config.toml"))
    directories = {path.relative_to(cell).as_posix(): path for path in found if is_run(path)}
    if not directories:
        return 0, []
    keep({name: RunDirectory(path) for name, path in directories.items()}, cell)
    kept, problems = kept_runs(cell), []
    for name, path in directories.items():
        differing = differences(kept[name], path)
        if differing:
            problems.append(f"{path} differs in {', '.join(differing)}")
        else:
            shutil.rmtree(path)
    for folder in sorted((path for name in INSIDE for path in (cell / name).rglob("*/")), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    for name in INSIDE:
        if (cell / name).is_dir() and not any((cell / name).iterdir()):
            (cell / name).rmdir()
    return len(directories) - len(problems), problems


def main(results: Path) -> int:
    problems = []
    for cell in cells(results):
        count, wrong = keep_cell(cell)
        problems += wrong
        print(f"{cell}: {count} runs kept, each restored byte for byte")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "results")))
