"""A whole federation on this machine, from its folder to its run directory, with a line per test on the way."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freshet.errors import RunError
from freshet.flower import processes
from freshet.flower.folder import init
from freshet.flower.running import LocalRun, Say, Stopped, ended_well, stoppable
from freshet.runs.writer import RunWriter, default_directory

#: Seconds beyond the length of a run that its start and its end may take.
SPARE = 300.0


def scored(row: Mapping[str, Any]) -> str:
    """What a row of metrics says of the model."""
    name = str(row.get("metric", "accuracy"))
    return f"{name} {row[name]:.3f}" if isinstance(row.get(name), int | float) else f"{name} –"


class Lines:
    """Says every new line of a run's metrics once."""

    def __init__(self, out: Path, say: Say) -> None:
        self._path, self._say, self._seen = out / "metrics.jsonl", say, 0

    def __call__(self) -> None:
        if not self._path.is_file():
            return
        whole = self._path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        for line in whole[self._seen :]:
            row = json.loads(line)
            self._say(f"{row['time']:6.1f} s  version {row['version']:4d}  {row['uploads']:4d} uploads  {scored(row)}")
        self._seen = max(self._seen, len(whole))


def local_run(
    tables: Mapping[str, Any],
    out: Path | None,
    keep: Path | None,
    server: Mapping[str, Any],
    dry_run: bool,
    say: Say,
) -> tuple[Path | None, str]:
    """Run it, or only print its commands; the run directory and how the run ended. On failure keys and logs stay."""
    folder = keep or Path(tempfile.mkdtemp(prefix="freshet-deploy-"))
    if dry_run:
        made = init(folder, tables, [], server)
        devices = range(int(tables["fleet"]["devices"]))
        commands = [*processes.superlink(made), *(processes.register(made, node) for node in devices)]
        commands += [*(processes.supernode(made, node) for node in devices), processes.run(made)]
        for command in commands:
            print(command)
        if keep is None:
            shutil.rmtree(folder)
        return None, ""
    name, seed = str(tables["method"]["name"]), int(tables["run"].get("seed", 0))
    directory = out or default_directory(name, seed)
    RunWriter.check(directory)
    say(f"starting a SuperLink and {tables['fleet']['devices']} SuperNodes; keys and logs are in {folder}")
    local, status = None, "failed"
    with stoppable():
        try:
            local = LocalRun(folder, tables, directory, say, server)
            seconds = float(tables["run"].get("until") or 0.0)
            status = local.wait(seconds + SPARE if seconds else 7 * 86400.0, Lines(directory, say))
        except Stopped:
            status = "interrupted"
        finally:
            if local is not None:
                local.stop()
    if keep is None and ended_well(status):
        shutil.rmtree(folder, ignore_errors=True)
    if status not in ("finished", "stopped", "diverged", "interrupted"):
        raise RunError(f"the run ended as {status}; see {folder / 'state' / 'logs'}")
    return directory, status
