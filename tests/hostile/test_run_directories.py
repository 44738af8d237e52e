"""Run directories from strangers or with two users: nothing outside is written, no code that they name is imported."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freshet import Federation, Observer, RunError
from freshet.cli.app import error_sentence
from freshet.config import resolve
from freshet.methods import builtin_about
from freshet.report import live
from freshet.runs import audit, checkpoint
from freshet.runs.lock import LOCK, RunLock
from freshet.runs.reader import RunDirectory
from freshet.sim.device_memory import DeviceStore

from ..cli.conftest import command  # noqa: F401
from ..conftest import small

SAVED = {"checkpoint_every": 10.0}


class Stop(Exception):
    pass


class StopAt(Observer):
    def __init__(self, time: float) -> None:
        self.time = time

    def on_progress(self, time: float) -> None:
        if time >= self.time:
            raise Stop


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in the middle, to be copied."""
    place = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        small("fedasmu", run=SAVED).run(60, out=place, observers=[StopAt(35.0)])
    return place


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    place = tmp_path / "run"
    shutil.copytree(whole, place)
    return place


def again() -> Federation:
    return small("fedasmu", run=SAVED)


# ---- writing only what lies in the directory


def symlink(path: Path, victim: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    path.unlink(missing_ok=True)
    path.hardlink_to(victim)


def pipe(path: Path, victim: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [symlink, hard_link, pipe])
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", LOCK])
def test_resume_writes_only_to_files_of_the_run(
    stopped: Path, tmp_path: Path, name: str, how: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    content = (stopped / name).read_bytes() if (stopped / name).is_file() else b"precious\n"
    victim.write_bytes(content + b"precious\n")
    how(stopped / name, victim)
    with pytest.raises(RunError, match=r"link|not a regular file|no checkpoint"):
        again().resume(stopped)
    assert victim.read_bytes() == content + b"precious\n"


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors"])
def test_an_atomic_write_replaces_a_link_and_not_its_target(stopped: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    precious = (stopped / name).read_bytes()
    victim.write_bytes(precious)
    symlink(stopped / name, victim)
    again().resume(stopped)
    assert victim.read_bytes() == precious != (stopped / name).read_bytes()
    assert not (stopped / name).is_symlink()


@pytest.mark.parametrize("name", ["checkpoint", "devices"])
def test_folders_that_are_links_are_refused(stopped: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    if name == "checkpoint":
        shutil.move(stopped / name, victim)
    else:
        victim.mkdir()
    (victim / "precious").write_text("precious")
    (victim / ".writing-1").mkdir()
    before = sorted(path.name for path in victim.iterdir())
    (stopped / name).symlink_to(victim)
    if name == "checkpoint":
        with pytest.raises(RunError, match="checkpoint is a link"):
            again().resume(stopped)
    else:
        store = DeviceStore(stopped / "devices", limit_bytes=0)
        with pytest.raises(RunError, match=r"devices cannot be written \(File exists\)"):
            store.put(0, {"w": np.zeros(4, np.float32)})
    assert sorted(path.name for path in victim.iterdir()) == before


# ---- one owner


def test_a_second_owner_gets_one_sentence_with_process_and_host(stopped: Path) -> None:
    with RunLock(stopped), pytest.raises(RunError) as caught:
        again().resume(stopped)
    said = str(caught.value)
    assert f"in use by process {os.getpid()} on " in said and "\n" not in said
    assert not (stopped / LOCK).exists()
    assert again().resume(stopped).summary["status"] == "finished"


def test_the_lock_of_a_killed_process_locks_nobody_out(stopped: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from freshet.runs.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, stopped], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"in use by process {child.pid} on "):
            RunLock(stopped)
        child.kill()
    assert (stopped / LOCK).exists()
    RunLock(stopped).release()
    assert not (stopped / LOCK).exists()


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"pid": "x"}', "null"])
def test_a_lock_file_may_say_anything(tmp_path: Path, content: str) -> None:
    lock = RunLock(tmp_path)
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(RunError, match="in use by another process"):
        RunLock(tmp_path)
    lock.release()


def test_an_owner_that_has_just_taken_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunLock(tmp_path)
    said = (tmp_path / LOCK).read_bytes()
    (tmp_path / LOCK).write_bytes(b"")
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: (tmp_path / LOCK).write_bytes(said))
    monkeypatch.setattr("freshet.runs.lock.time", clock)
    with pytest.raises(RunError, match=f"in use by process {os.getpid()} on "):
        RunLock(tmp_path)
    lock.release()


def test_a_run_owns_its_directory_until_it_has_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune, held = checkpoint.prune, []

    def looking(directory: Path, keep: int) -> None:
        try:
            RunLock(tmp_path / "run").release()
        except RunError:
            held.append(keep)
        prune(directory, keep)

    monkeypatch.setattr(checkpoint, "prune", looking)
    config = {"data": {"train_samples": 240, "test_samples": 60}, "fleet": {"devices": 8}, "run": SAVED}
    Federation("mlp", method="fedavg", **config).run(40, out=tmp_path / "run")
    assert held[-1] == 1 and len(list((tmp_path / "run" / "checkpoint").iterdir())) == 1


def test_one_of_several_racing_processes_owns_a_directory(tmp_path: Path) -> None:
    owners: list[int] = []
    most = 0

    def race(number: int) -> int:
        nonlocal most
        won = 0
        for _ in range(150):
            try:
                with RunLock(tmp_path):
                    owners.append(number)
                    most = max(most, len(owners))
                    won += 1
                    owners.remove(number)
            except RunError:
                pass
        return won

    with ThreadPoolExecutor(8) as pool:
        won = sum(pool.map(race, range(8)))
    assert most == 1 and won > 0
    assert not (tmp_path / LOCK).exists()


def test_one_of_several_concurrent_resumes_continues_and_the_others_say_why(stopped: Path) -> None:
    line = [sys.executable, "-m", "freshet", "resume", stopped, "--quiet"]
    shutil.rmtree(stopped)
    config = {"data": {"train_samples": 240, "test_samples": 60}, "fleet": {"devices": 8}, "run": SAVED}
    federation = Federation("mlp", method="fedavg", **config)
    with pytest.raises(Stop):
        federation.run(120, out=stopped, observers=[StopAt(35.0)])
    racers = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [(*racer.communicate(timeout=200), racer.returncode) for racer in racers]
    assert sorted(code for _, _, code in ended) == [0, 2, 2, 2], ended
    for _, said, code in ended:
        if code:
            assert "in use by" in said or "already finished" in said
            assert len(said.strip().splitlines()) == 1
    assert audit.audit(RunDirectory(stopped)).passed


class Removed(Observer):
    """Takes the directory away in the middle of the run, and may put another in its place."""

    def __init__(self, place: Path, other: bool) -> None:
        self.place, self.other = place, other

    def on_progress(self, time: float) -> None:
        if time >= 25 and self.place.exists() and not (self.place / "other").exists():
            self.place.rename(self.place.with_name("taken"))
            if self.other:
                self.place.mkdir()
                (self.place / "other").touch()


@pytest.mark.parametrize("other", [False, True])
def test_a_run_stops_with_one_sentence_if_its_directory_is_removed(tmp_path: Path, other: bool) -> None:
    place = tmp_path / "run"
    with pytest.raises(RunError, match="was removed or replaced during its run; nothing more is written"):
        small("fedavg", run=SAVED).run(100, out=place, observers=[Removed(place, other)])
    assert [path.name for path in tmp_path.glob("run/*")] == ["other"] * other


# ---- nothing is imported on the word of a file


TRAP = "from pathlib import Path\nPath({trace!r}).touch()\nclass Mine: pass\n"


@pytest.fixture
def trapped(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose config.toml names a module that would leave a trace when imported."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "evilmod.py").write_text(TRAP.format(trace=str(tmp_path / "trace")))
    monkeypatch.syspath_prepend(str(modules))
    config = (stopped / "config.toml").read_text().replace('name = "fedasmu"', 'name = "evilmod:Mine"')
    (stopped / "config.toml").write_text(config)
    assert builtin_about("evilmod:Mine") is None
    return stopped


LINES = [
    ["show", "RUN"],
    ["audit", "RUN"],
    ["resume", "RUN"],
    ["report", "RUN", "-o", "page.html"],
    ["export", "RUN", "--csv", "table.csv"],
    ["pretrain", "RUN", "-o", "meta.safetensors"],
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_no_command_imports_code_that_a_run_names(command: Any, trapped: Path, tmp_path: Path, line) -> None:  # noqa: F811
    done = command(*(trapped if part == "RUN" else part for part in line))
    assert not (tmp_path / "trace").exists()
    assert done.code == {"resume": 2, "audit": 3}.get(line[0], 0), done
    if line[0] == "audit":
        assert "not audited: evilmod:Mine is not built in; name it with --method" in done.out
    if line[0] == "resume":
        assert "evilmod:Mine" in done.err and "--method evilmod:Mine" in done.err


def test_watch_imports_nothing(trapped: Path, tmp_path: Path) -> None:
    with live.WatchServer(trapped) as server:
        assert server.run.answer("")
    assert not (tmp_path / "trace").exists()


def test_a_federation_resumes_only_runs_of_its_method(trapped: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="another configuration: its method is evilmod:Mine"):
        again().resume(trapped)
    assert not (tmp_path / "trace").exists()


def test_an_own_method_is_audited_and_resumed_when_it_is_named(command: Any, tmp_path: Path) -> None:  # noqa: F811
    name, place = "tests.methods.foreign:Trust", tmp_path / "own"
    with pytest.raises(Stop):
        small({"name": name}, model="mlp", run=SAVED).run(60, out=place, observers=[StopAt(35.0)])
    assert "not audited" in command("audit", place).out
    assert ": ok (" in command("audit", place, "--method", name).out
    assert command("resume", place, "-q").code == 2
    assert command("resume", place, "-q", "--method", name).code == 0


# ---- settings that were changed in between


@pytest.mark.parametrize(
    ("old", "new", "noticed"), [("lr = 0.05", "lr = 0.06", True), ("target = 0.8", "target = 0.7", False)]
)
def test_settings_changed_since_the_run_began_are_noticed(tmp_path: Path, old: str, new: str, noticed: bool) -> None:
    place, settings = tmp_path / "run", {"run": SAVED, "model": "mlp"}
    with pytest.raises(Stop):
        small("fedavg", **settings).run(60, out=place, observers=[StopAt(35.0)])
    text = (place / "config.toml").read_text()
    assert old in text
    (place / "config.toml").write_text(text.replace(old, new))
    federation = Federation.from_config(resolve(RunDirectory(place).config()))
    if noticed:
        with pytest.raises(RunError, match=r"config\.toml was changed after the run began"):
            federation.resume(place)
    else:
        assert federation.resume(place).summary["target"] == 0.7


def test_errors_of_the_machine_as_sentences() -> None:
    assert (
        error_sentence(OSError(28, "No space left on device", "/x"))
        == "/x: No space left on device (--debug shows the traceback)"
    )
    assert "nested too deeply" in error_sentence(RecursionError()) and "memory" in error_sentence(MemoryError())
