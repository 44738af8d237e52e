"""The command: help, version, exit codes, and one sentence for every mistake."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import freshet

POSITIONALS = {
    "resume": "A run directory.",
    "watch": "A run directory, also of a run that is going.",
    "show": "Run directories, or folders that contain some.",
    "cells": "Show one cell's settings and published results.",
    "pretrain": "Earlier FedASMU or FedSSMU runs.",
}


@pytest.mark.parametrize("name", POSITIONALS)
def test_the_help_of_a_positional_argument_is_shown(command, name):
    done = command(name, "--help")
    assert done.code == 0
    assert POSITIONALS[name] in " ".join(done.out.split())


def test_a_mistyped_command_gets_one_suggestion(command):
    done = command("rnu")
    assert done.code == 2
    assert done.err.count("Did you mean 'run'?") == 1


@pytest.mark.parametrize("line", [["methods"], ["--help"], ["audit", "RUN", "RUN"]])
def test_a_closed_pipe_is_not_an_error(line, finished, tmp_path: Path):
    words = [str(finished("fedasmu").directory) if word == "RUN" else word for word in line]
    code = "import sys, time; from freshet.cli import main; time.sleep(0.5); main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(120), said) == (0, "")


def test_errors_of_every_command_begin_with_freshet(command):
    done = command("data", "get", "mnist")
    assert (done.code, done.err.startswith("freshet: data.name")) == (2, True)


def test_choices_and_empty_settings_are_shown(command, finished):
    said = " ".join(command("methods", "fedasync").out.split())
    assert "one of constant, polynomial, hinge" in said
    shown = command("show", finished("fedasmu").directory).out
    assert "trace –, measured –," in shown and "local_epochs –," in shown and " ," not in shown
    assert " ," not in command("methods").out


COMMANDS = ["run", "demo", "methods", "models", "show", "audit", "data"]


def process(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from freshet.cli import main; main()", *(str(a) for a in arguments)]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_version(command):
    done = command("--version")
    assert (done.code, done.out.strip()) == (0, f"freshet {freshet.__version__}")


def test_help_lists_every_command(command):
    done = command("--help")
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)


def test_help_groups_the_commands_by_what_a_user_wants(command):
    from freshet.cli.app import GROUPS, app

    assert [line for line in command("--help").out.splitlines() if "╭─" in line][1:], "a box per group"
    registered = {each.name for each in (*app.registered_commands, *app.registered_groups)}
    grouped = [name for commands in GROUPS.values() for name in commands]
    assert registered == set(grouped) and len(grouped) == len(set(grouped))
    assert all(group in command("--help").out for group in GROUPS)


def test_settings_are_listed_and_explained(command):
    everything = command("settings").out
    assert all(f"[{section}]" in everything for section in ("training", "fleet", "run", "privacy"))
    assert "initial learning rate" in command("settings", "training.lr").out
    assert command("settings", "lr").out == command("settings", "training.lr").out
    section = command("settings", "links").out
    assert "[links]" in section and "[fleet]" not in section
    for given, meant in (("trainin.lr", "training.lr"), ("epoch", "training.epochs"), ("zzz", "lists all")):
        done = command("settings", given)
        assert done.code == 2 and meant in done.err


def test_setting_without_its_section_and_a_mistyped_section_get_a_hint(command):
    done = command("run", "-m", "fedavg", "-s", "lr=0.1")
    assert done.code == 2 and "did you mean training.lr=0.1?" in done.err
    done = command("run", "-m", "fedavg", "-s", "traning.lr=0.1")
    assert done.code == 2 and "did you mean training?" in done.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "run",
            [
                "--method",
                "--config",
                "--until",
                "--rounds",
                "--seed",
                "--out",
                "--set",
                "section.key=value",
                "10m",
                "Example",
            ],
        ),
        ("demo", ["--out", "--until", "--seed"]),
        ("methods", ["NAME", "options"]),
        ("models", ["networks"]),
        ("show", ["RUN"]),
        ("audit", ["RUN", "line"]),
        ("data", ["list"]),
    ],
)
def test_the_help_of_a_command_names_its_main_options(command, name, words):
    done = command(name, "--help")
    assert done.code == 0
    assert [word for word in words if word not in done.out and word.lower() not in done.out.lower()] == []


BAD = [
    (["-m", "fedasmu", "-s", "fleet.devices=0"], "fleet.devices", "1"),
    (["-m", "fedasmu", "-s", "fleet.devices=ten"], "fleet.devices", "integer"),
    (["-m", "fedasmu", "-s", "fleet.devices=100000"], "fleet.devices", "allowed: 1 to"),
    (["-m", "fedasmu", "-s", "fleet.devices=1000"], "data.min_samples", "allowed"),
    (["-m", "fedasmu", "-s", "fleet.ratio=0.5"], "fleet.ratio", "1"),
    (["-m", "fedasmu", "-s", "fleet.devices=5", "-s", "run.per_round=6"], "run.per_round", "5"),
    (["-m", "fedasmu", "-s", "method.slot=6"], "method.slot", "1..5"),
    (["-m", "fedasmu", "-s", "method.slot=0"], "method.slot", "1..5"),
    (["-m", "fedasmu", "-s", "fleet.ratoi=2"], "fleet.ratoi", "fleet.ratio"),
    (["-m", "fedasmu", "-s", "flet.ratio=2"], "flet", "fleet"),
    (["-m", "fedasmu", "-s", "ratio=2"], "--set", "section.key=value"),
    (["-m", "fedasmu", "-s", "training.lr=fast"], "training.lr", "number"),
    (["-m", "fedasmu", "-s", "data.name=mnist3d"], "data.name", "digits"),
    (["-m", "fedasmu", "-s", "model.name=giant"], "model.name", "digits"),
    (["-m", "fedasmu", "-s", "data.train_samples=99999"], "data.train_samples", "allowed"),
    (["-m", "nonsense"], "method.name", "fedasmu"),
    (["-m", "fedasmu", "--until", "soon"], "run.until", "10m"),
    (["-m", "fedasmu", "--until", "-5"], "run.until", "positive"),
    (["-m", "fedasmu", "--rounds", "-2"], "run.rounds", "0"),
    (["-m", "fedasmu", "-s", "model.pool=true"], "model.pool", "digits"),
    (["-m", "fedasmu", "--seed", "-1"], "run.seed", "0"),
    (["-c", "missing.toml"], "--config", "does not exist"),
    ([], "--method", "freshet methods"),
]


@pytest.mark.parametrize(("arguments", "key", "allowed"), BAD)
def test_bad_input_gives_one_sentence_exit_code_2_and_no_files(command, tmp_path, arguments, key, allowed):
    done = command("run", *arguments)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert done.err.startswith("freshet: ")
    assert key in done.err and allowed in done.err
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


FILES = {
    "method is no table": 'method = "fedavg"\n',
    "run is no table": "run = 5\n",
    "fleet is no table": "fleet = [1, 2]\n",
    "no toml": "[run\n",
}


@pytest.mark.parametrize("flags", [[], ["-m", "fedavg"], ["--seed", "1"], ["--until", "5"], ["-s", "run.seed=1"]])
@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_gives_one_sentence_with_any_flags(command, tmp_path, case, flags):
    Path("c.toml").write_text(FILES[case])
    done = command("run", "-c", "c.toml", *flags)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def test_a_seed_that_is_not_a_number_is_refused_by_the_name_of_the_flag(command, tmp_path):
    done = command("run", "-m", "fedavg", "--seed", "abc")
    assert done.code == 2
    assert "--seed" in done.err and "integer" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_separate_process_ends_in_the_same_way(tmp_path):
    done = process("run", "-m", "fedavg", "-s", "fleet.devices=0", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_output_in_a_small_encoding_is_not_a_traceback(finished, tmp_path, encoding):
    """Curves and dashes of the tables are not in latin-1."""
    line = [sys.executable, "-m", "freshet", "show", str(finished("fedasmu").directory)]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr and b"fedasmu" in done.stdout


def test_options_show_their_choices(command):
    for name in ("run", "resume", "compare"):
        assert "auto|serial|processes|ray" in command(name, "--help").out.replace("\n", ""), name
    refused = command("run", "-m", "fedavg", "--executor", "threads")
    assert refused.code == 2 and "'auto', 'serial', 'processes', 'ray'" in refused.err


def test_warmup_compiles_every_loop(tmp_path):
    line = [sys.executable, "-m", "freshet", "warmup"]
    done = subprocess.run(line, env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert re.fullmatch(r"22 loops are ready \(\d+ s\)\n", done.stdout), done.stderr
    assert len(list(tmp_path.rglob("*.nbc"))) == 22
