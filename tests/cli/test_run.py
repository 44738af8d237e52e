"""``freshet run`` and ``freshet demo`` through the real entry point."""

import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from freshet.compute import choice
from freshet.compute.executor import SerialExecutor
from tests.methods import contract_methods

FAST = ["-s", "model.name=mlp", "-s", "fleet.devices=6", "-s", "data.train_samples=150", "-s", "run.executor=serial"]


def test_flags_settings_and_defaults_are_written_to_the_configuration(command):
    done = command(
        "run", "-m", "fedavg", "--until", "0.1m", "--seed", 3, "-o", "here", "-s", "fleet.ratio=20", "-q", *FAST
    )
    assert (done.code, done.out.strip()) == (0, "here")
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert (config["method"]["name"], config["run"]["until"], config["run"]["seed"]) == ("fedavg", 6.0, 3)
    assert (config["fleet"]["ratio"], config["fleet"]["devices"]) == (20.0, 6)
    assert json.loads(Path("here/summary.json").read_text())["status"] == "finished"


def test_without_out_the_run_goes_under_runs(command):
    done = command("run", "-m", "fedavg", "--until", 5, "-q", *FAST)
    directory = Path(done.out.strip())
    assert done.code == 0
    assert directory.parent == Path("runs")
    assert (directory / "summary.json").is_file()


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedavg"])
def test_a_written_configuration_repeats_the_run_bit_for_bit(command, method):
    first = command("run", "-m", method, "--until", 45, "-o", "one", "-s", "training.lr=0.1234567891234", "-q", *FAST)
    again = command("run", "--config", "one/config.toml", "-o", "two", "-q")
    assert (first.code, again.code) == (0, 0)
    assert Path("one/events.jsonl").read_bytes() == Path("two/events.jsonl").read_bytes()
    assert Path("one/config.toml").read_bytes() == Path("two/config.toml").read_bytes()
    sums = [json.loads(Path(name, "summary.json").read_text())["weights_sha256"] for name in ("one", "two")]
    assert sums[0] == sums[1]


def test_flags_override_the_file_and_settings_override_flags(command):
    Path("c.toml").write_text('[method]\nname = "fedavg"\n[run]\nseed = 1\nuntil = 50.0\nper_round = 2\n')
    done = command("run", "-c", "c.toml", "--seed", 2, "--until", 5, "-s", "run.seed=3", "-o", "x", "-q", *FAST)
    assert done.code == 0
    run = tomllib.loads(Path("x/config.toml").read_text())["run"]
    assert (run["seed"], run["until"], run["per_round"]) == (3, 5.0, 2)


def test_the_table_and_the_directory_are_printed(command):
    done = command("run", "-m", "fedavg", "--until", 5, "-o", "x", *FAST)
    assert done.code == 0
    assert "accuracy" in done.out
    assert done.out.strip().splitlines()[-1] == "x"


@pytest.mark.parametrize(("method", "uploads"), [("fedavg", 12), ("fedasmu", 12)])
def test_a_run_can_end_by_rounds(command, method, uploads):
    done = command("run", "-m", method, "--rounds", 2, "-o", "x", "-q", *FAST)
    assert (done.code, done.out.strip()) == (0, "x")
    run = tomllib.loads(Path("x/config.toml").read_text())["run"]
    assert (run["rounds"], run["until"], run["per_round"]) == (2, 0.0, 6)
    summary = json.loads(Path("x/summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["uploads"]) == ("finished", 2, uploads)
    assert ", 2 rounds, in " in command("show", "x").out


WILD = ["-s", "training.lr=3e4", "-s", "run.eval_every=5", "-s", "run.gate=off"]


def test_a_run_that_diverges_says_so_in_the_table_and_in_a_sentence(command):
    done = command("run", "-m", "fedavg", "--until", 500, "-o", "x", *FAST, *WILD)
    assert done.code == 0
    time = json.loads(Path("x/summary.json").read_text())["diverged"]
    said = f"fedavg diverged at {time:g} s: test loss "
    assert "fedavg diverged" in done.out
    assert done.err.count(said) == 1 and "; try a smaller training.lr" in done.err
    shown = command("show", "x").out
    assert said in shown and "status" in shown and shown.count("diverged") >= 3
    again = command("resume", "x")
    assert (again.code, len(again.err.strip().splitlines())) == (2, 1)
    assert f"x diverged at {time} s and cannot be resumed" in again.err


def test_a_run_that_continues_after_divergence_says_so_too(command):
    done = command("run", "-m", "fedavg", "--until", 60, "-o", "x", *FAST, *WILD, "-s", "run.diverged=continue")
    assert json.loads(Path("x/summary.json").read_text())["status"] == "finished"
    assert "fedavg diverged" in done.out and "fedavg diverged at" in done.err


@pytest.mark.parametrize("lr", ["30", "1e38"])
def test_a_run_with_many_rejected_uploads_says_so_and_what_to_do(command, lr):
    rate = ["-s", f"training.lr={lr}", "-s", "run.diverged=continue"]
    done = command("run", "-m", "fedasync", "--until", 60, "-o", "x", *FAST, *rate)
    summary = json.loads(Path("x/summary.json").read_text())
    share = "all" if summary["rejected"] == summary["uploads"] else f"{summary['rejected']} of"
    assert 2 * summary["wild"] > summary["rejected"] > 0
    sentence = (
        f"fedasync: {share} {summary['uploads']} uploads were rejected; "
        "most were not finite or far larger than usual; try a smaller training.lr"
    )
    assert sentence in done.err and sentence in command("show", "x").out


@pytest.mark.parametrize("taken", ["a folder with files", "a file", "below a file"])
def test_an_output_that_exists_gives_one_sentence_and_stays_unchanged(command, tmp_path, taken):
    out = Path("out")
    if taken == "a folder with files":
        out.mkdir()
        (out / "mine").touch()
    else:
        out.write_text("mine")
    done = command(
        "run", "-m", "fedavg", "--until", 5, "-q", "-o", out / "run" if taken == "below a file" else out, *FAST
    )
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "out" in done.err
    assert [p.name for p in tmp_path.rglob("*")] == (["out", "mine"] if out.is_dir() else ["out"])


@pytest.mark.parametrize("name", contract_methods.SENTENCES)
def test_a_method_that_breaks_the_contract_gives_one_sentence(command, name):
    settings = [*FAST, "-s", "run.per_round=3"]
    done = command("run", "-m", f"tests.methods.contract_methods:{name}", "--until", 300, "-q", "-o", "run", *settings)
    assert done.code == 2
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"freshet: {contract_methods.SENTENCES[name]}")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_ctrl_c_leaves_a_run_directory_that_passes_the_audit(tmp_path, command, executor):
    arguments = ["run", "-m", "fedasmu", "--until", "1000h", "-o", "run", "-q", *FAST, "-s", f"run.executor={executor}"]
    line = [sys.executable, "-c", "from freshet.cli import main; main()", *arguments]
    log = tmp_path / "run" / "events.jsonl"
    with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        try:
            deadline = time.monotonic() + 240
            while not (log.is_file() and log.stat().st_size > 0) and time.monotonic() < deadline:
                assert running.poll() is None
                time.sleep(0.05)
            assert log.stat().st_size > 0
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=240)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "Traceback" not in err and "interrupted" in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["virtual_time"] < 3_600_000
    assert command("audit", "run").code == 0
    assert command("show", "run").code == 0


def test_the_demo_ends_with_the_command_for_its_report(command, monkeypatch):
    from freshet.cli import run

    monkeypatch.setattr(run, "DEMO_METHODS", ("fedavg",))
    done = command("demo", "--until", "30s")
    assert done.code == 0
    last = done.out.strip().splitlines()[-1]
    assert last == "see the full report in a browser: freshet report runs/demo --open"
    assert command(*last.partition("freshet ")[2].split()[:2]).code == 0  # the printed command works
    assert Path("report.html").is_file()


@pytest.mark.parametrize(
    ("argument", "on_path", "expected"),
    [
        (".venv/bin/freshet", None, ".venv/bin/freshet"),
        (".venv/bin/freshet", "/usr/bin/freshet", ".venv/bin/freshet"),
        ("/usr/bin/freshet", "/usr/bin/freshet", "freshet"),
        ("pytest", None, "freshet"),
    ],
)
def test_the_printed_command_can_be_typed(monkeypatch, argument, on_path, expected):
    from freshet.cli import run

    monkeypatch.setattr(run.sys, "argv", [argument])
    monkeypatch.setattr(run.shutil, "which", lambda name: on_path)
    assert run.own_command() == expected


def test_a_small_run_starts_no_workers(command, monkeypatch):
    def refuse(*_):
        raise AssertionError("workers were started")

    monkeypatch.setattr(choice, "start_pool", refuse)
    monkeypatch.setattr(choice, "available_cores", lambda: 8)
    opened = []
    monkeypatch.setattr(choice, "SerialExecutor", lambda setup: opened.append(1) or SerialExecutor(setup))
    assert command("run", "-m", "fedavg", "--until", 20, "-s", "model.name=mlp", "-q", "-o", "x").code == 0
    assert opened == [1]
    assert json.loads(Path("x/summary.json").read_text())["status"] == "finished"
