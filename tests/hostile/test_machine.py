"""The machine misbehaves: one sentence, nothing is destroyed, and the run can be resumed."""

import errno
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch

from freshet import ConfigError, Observer, RunError
from freshet.compute import ray as on_ray
from freshet.methods.asmu.meta import ShapedSelector
from freshet.report import live, loopback
from freshet.report.export import neutralise
from freshet.runs import checkpoint, writer
from freshet.runs.reader import RunDirectory

from ..cli.conftest import command  # noqa: F401
from ..conftest import small
from .test_run_directories import SAVED, StopAt
from .test_run_directories import Stop as Stopped


class Full:
    """A file on a disk that is full after so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: bytes) -> int:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Any:
        return self.file.__enter__()

    def __exit__(self, *problem: Any) -> Any:
        return self.file.__exit__(*problem)


def test_a_full_disk_ends_a_run_with_one_sentence_and_it_can_be_resumed(tmp_path: Path, monkeypatch) -> None:
    whole = small("fedavg", run=SAVED).run(60, out=tmp_path / "whole")
    open_own = writer.open_own
    monkeypatch.setattr(writer, "open_own", lambda path, **how: Full(open_own(path, **how), 2000))
    with pytest.raises(
        RunError, match=r"cannot be written \(No space left on device\); fix this, then run: freshet resume"
    ):
        small("fedavg", run=SAVED).run(60, out=tmp_path / "full")
    monkeypatch.undo()
    result = small("fedavg", run=SAVED).resume(tmp_path / "full")
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert (tmp_path / "full" / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    """A small disk of its own; where nobody may mount one, the test is skipped and says so."""
    place = tmp_path / "disk"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(line, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_really_full_disk_ends_a_run_with_one_sentence_and_it_can_be_resumed(disk: Path, tmp_path: Path) -> None:
    whole = small("fedasync", run=SAVED).run(1500, out=tmp_path / "whole")
    with pytest.raises(RunError, match=r"\(No space left on device\)"):
        small("fedasync", run=SAVED).run(1500, out=disk / "run")
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    result = small("fedasync", run=SAVED).resume(disk / "run")
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert (disk / "run" / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path: Path, monkeypatch) -> None:
    checkpoint.write(tmp_path, {"log": {"seq": 0, "events": 0, "metrics": 0}, "x": np.arange(3)})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "serialise", lambda arrays: (full() for _ in range(1)))
    with pytest.raises(RunError, match=r"checkpoint cannot be written \(No space left on device\)"):
        checkpoint.write(tmp_path, {"x": np.arange(3)})
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["000001"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_signals_of_a_batch_system_end_a_run_as_ctrl_c_does(tmp_path: Path, number: signal.Signals) -> None:
    class Once(Observer):
        sent = False

        def on_progress(self, time: float) -> None:
            if not self.sent and time >= 20:
                self.sent = True
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = small("fedavg", run=SAVED).run(60, out=tmp_path / "run", observers=[Once()])
    assert result.summary["status"] == "interrupted"
    assert signal.getsignal(number) == before
    assert small("fedavg", run=SAVED).resume(tmp_path / "run").summary["status"] == "finished"


def test_ctrl_c_while_modules_load_gives_no_traceback() -> None:
    program = "import freshet.cli, sys\nsys.modules['freshet.cli.app'] = Trap = type('T', (), {})()\n"
    program += "def main(): raise KeyboardInterrupt\nTrap.main = main\nfreshet.cli.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_of_the_machine_is_one_sentence_and_with_debug_a_traceback(command, monkeypatch, debug) -> None:  # noqa: F811
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/some/where")

    monkeypatch.setattr("freshet.cli.inspect.RunDirectory", refuse)
    if debug:
        with pytest.raises(OSError, match="Too many open files"):
            command("show", "run", "--debug")
        return
    done = command("show", "run")
    assert (done.code, done.err) == (2, "freshet: /some/where: Too many open files (--debug shows the traceback)\n")


# ---- settings that would never end


ENDLESS = [
    {"run": {"eval_every": 1e-300}},
    {"run": {"eval_every": 1e-9}},
    {"run": {"period": 1e-300}},
    {"run": {"until": 1e300}},
    {"run": {"until": 0.0, "rounds": 10**12}},
    {"run": {"until": 0.0, "rounds": 10, "eval_every": 1e-300}},
    {"fleet": {"fastest": 1e-300, "up_latency": 0.0, "down_latency": 0.0, "up_mbps": 1e300, "down_mbps": 1e300}},
    {"fleet": {"on_seconds": 1e-300, "off_seconds": 1e-300}},
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fedavg", "fedasync"])
@pytest.mark.parametrize("given", ENDLESS, ids=str)
def test_a_run_that_would_never_end_is_refused_with_its_numbers(tmp_path: Path, given: dict, method: str) -> None:
    trigger = {"trigger": "concurrency"} if method == "fedasync" and "fleet" in given else {}
    given = {"run": trigger} | given
    if method == "fedavg" and "period" in given["run"]:
        given = {"run": {"eval_every": 1e-300}}
    with pytest.raises(ConfigError, match=r"would make .* in .* s, more than 100,000,000; increase it"):
        small(method, **given).run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- files from outside


def test_an_invalid_meta_model_is_one_sentence(tmp_path: Path) -> None:
    import torch

    selector = ShapedSelector(4, 0.1, 0.5, 0)
    selector.save(tmp_path / "good")
    good = load_file(tmp_path / "good")
    save_torch({name: value.bfloat16() for name, value in good.items()}, tmp_path / "bf16")
    save_torch(good | {"rewards": torch.zeros(2, 1, dtype=torch.float64)}, tmp_path / "flat")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "noise").write_bytes(b"\xff" * 100)
    for name in ("bf16", "flat", "pipe", "noise", "missing"):
        with pytest.raises(ConfigError, match=r"^method\.meta_from: .* is not a pre-trained meta model"):
            selector.load(tmp_path / name)
    selector.load(tmp_path / "good")


ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def test_terminal_control_sequences_are_escaped(command, finished, tmp_path: Path) -> None:  # noqa: F811
    place = tmp_path / "run"
    shutil.copytree(finished("fedavg").directory, place)
    for name, change in (("config.toml", r"\u001b]0;owned\u0007\u001b[31m"), ("summary.json", r"\u001b]0;owned\u0007")):
        text = (place / name).read_text().replace("fedavg", change)
        (place / name).write_text(text)
    events = (place / "events.jsonl").read_text().replace('"trigger"', r'"\u001b]0;owned\u0007"', 1)
    (place / "events.jsonl").write_text(events)
    for line in (["show", place], ["audit", place], ["resume", place], ["export", place, "--csv", tmp_path / "t.csv"]):
        done = command(*line)
        assert "\x1b]" not in done.out + done.err and "\x07" not in done.out + done.err, line
    assert "\x1b" not in (tmp_path / "t.csv").read_text()


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1"])
def test_a_cell_that_a_spreadsheet_would_run_is_plain_text(text: str) -> None:
    assert neutralise(text)[0] in "'\\"
    assert neutralise("fedavg") == "fedavg"


NESTED = "[" * 200_000


@pytest.mark.timeout(120)
@pytest.mark.parametrize("verb", ["show", "audit", "resume", "report", "export"])
def test_nonsense_in_a_run_directory_is_one_sentence(command, finished, tmp_path: Path, verb: str) -> None:  # noqa: F811
    nonsense = {
        "config.toml": [f"a = {NESTED}", "method = 3", "[method]\nname = 3", '[run]\nuntil = "x"', "a = " + "9" * 5000],
        "summary.json": [NESTED, "[]", '{"status": []}', '{"status": "finished", "method": {}}', "9" * 5000],
        "events.jsonl": [NESTED, '{"seq": "x"}', '{"seq": 1, "time": "a", "kind": []}', "\x00", "9" * 5000],
        "metrics.jsonl": [NESTED, '{"time": {}, "accuracy": "x"}', "\ud800".encode("utf-8", "replace").decode()],
        "world.json": [NESTED, "{}", '{"train_seconds": [[]]}'],
    }
    extra = {"report": ["-o", tmp_path / "page.html"], "export": ["--csv", tmp_path / "t.csv"], "resume": ["-q"]}
    for name, contents in nonsense.items():
        for content in contents:
            place = tmp_path / "run"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(finished("fedasmu").directory, place)
            (place / name).write_text(content)
            done = command(verb, place, *extra.get(verb, []))
            assert done.code in (0, 1, 2), (name, content[:30])
            assert "Traceback" not in done.err and len(done.err.strip().splitlines()) <= 3, (name, content[:30], done)


def tampered(place: Path, change: Any) -> None:
    """Change the newest checkpoint's state, and its checksum with it."""
    import hashlib

    newest = sorted((place / "checkpoint").iterdir())[-1]
    document = json.loads((newest / "state.json").read_text())
    change(document["state"])
    content = json.dumps(document).encode()
    (newest / "state.json").write_bytes(content)
    sums = json.loads((newest / "checksums.json").read_text())
    sums["state.json"] = hashlib.sha256(content).hexdigest()
    (newest / "checksums.json").write_text(json.dumps(sums))


CHANGES = {
    "no heap": lambda state: state.update(heap=[[0.0, "x", 1, 2]]),
    "an event of old": lambda state: state.update(heap=[[-1e300, *state["heap"][0][1:]]]),
    "no number": lambda state: state.update(now="x"),
    "a seq of another kind": lambda state: state["log"].update(seq="x"),
    "a negative length": lambda state: state["log"].update(events=-5),
    "no coordinator": lambda state: state.update(coordinator={}),
    "a server of another kind": lambda state: state["coordinator"].update(server=[]),
    "journeys of nobody": lambda state: state.update(journeys={"999": {}}),
    "no real time": lambda state: state.update(wall_seconds="x"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("change", CHANGES)
def test_an_invalid_state_with_valid_checksums_is_one_sentence(tmp_path: Path, change: str) -> None:
    place = tmp_path / "run"
    with pytest.raises(Stopped):
        small("fedavg", run=SAVED | {"checkpoint_every": 25.0}).run(60, out=place, observers=[StopAt(45.0)])
    for old in sorted((place / "checkpoint").iterdir())[:-1]:
        shutil.rmtree(old)
    tampered(place, CHANGES[change])
    with pytest.raises(RunError) as caught:
        small("fedavg", run=SAVED | {"checkpoint_every": 25.0}).resume(place)
    assert "\n" not in str(caught.value)


# ---- the live view


def half_asked(port: int) -> list[socket.socket]:
    """Clients that say no more."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1")
    return clients


def test_slow_and_strange_clients_do_not_hold_up_the_live_view(finished, monkeypatch) -> None:
    import threading
    from http.client import HTTPConnection

    monkeypatch.setattr(loopback._Handler, "timeout", 120.0)  # honest clients on a busy machine have their time
    with live.WatchServer(finished("fedavg").directory) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        slow = half_asked(server.server_port)
        try:
            for method, host, code in (
                ("GET", "", 200),
                ("GET", "evil.example", 403),
                ("POST", "", 501),
                ("PUT", "", 501),
            ):
                connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
                connection.request(method, "/", headers={"Host": host or f"127.0.0.1:{server.server_port}"})
                assert connection.getresponse().status == code
                connection.close()
            monkeypatch.setattr(loopback._Handler, "timeout", 1.0)
            slow += (left := half_asked(server.server_port))
            begun = time.monotonic()
            for client in left:
                client.settimeout(60)
                assert client.recv(1) == b"", "left after its patience"
            assert time.monotonic() - begun < len(left), "all at once, not one after the other"
        finally:
            for client in slow:
                client.close()
            server.shutdown()
            thread.join()


# ---- Ray's folder


def test_rays_folder_is_private_and_leftover_folders_are_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(on_ray.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(on_ray, "_MAX_TEMP_LENGTH", 1000)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old, mine = tmp_path / f"freshet-ray-{dead.pid}-x", tmp_path / f"freshet-ray-{os.getpid()}-x"
    for folder in (old, mine, tmp_path / "freshet-ray-nonsense"):
        folder.mkdir()
    made = on_ray.make_private_folder()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert sorted(tmp_path.iterdir()) == sorted([made, mine, tmp_path / "freshet-ray-nonsense"])


def test_a_run_that_rejects_all_uploads_reports_it(command, tmp_path: Path) -> None:  # noqa: F811
    result = small("fedavg", model="mlp", training={"lr": 1e38}, run={"diverged": "continue"}).run(
        40, out=tmp_path / "r"
    )
    assert result.summary["rejected"] == result.summary["uploads"] > 0
    done = command("show", tmp_path / "r")
    assert "all uploads rejected" in done.out and f"all {result.summary['uploads']} uploads were rejected" in done.out
    assert RunDirectory(tmp_path / "r").finished()


TORN = [
    '{"op_code": 0, "worker_id": "x"',
    "[" * 100_000 + "\n",
    '{"op_code": 99}\n',
    "\x00" * 50 + "\n",
    "3\n",
    '"x"\n',
]


@pytest.mark.parametrize("torn", TORN, ids=range(len(TORN)))
def test_a_truncated_journal_of_a_study_is_resumed_or_is_one_sentence(tmp_path: Path, torn: str) -> None:
    tune = pytest.importorskip("freshet.experiments.tune")
    optuna = tune.load_optuna()
    make = tune.Tuner("fedprox", {"method": {"name": "fedprox"}}, tmp_path, tune.Budget(1, 1))
    make._open(optuna)
    journal = tmp_path / "study.journal"
    whole = journal.read_text()
    for content in (torn, whole + torn, torn + whole):
        journal.write_text(content)
        try:
            make._open(optuna)
        except RunError as error:
            assert "study.journal is damaged" in str(error) and "remove it to start again" in str(error)
