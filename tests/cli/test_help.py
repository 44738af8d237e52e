"""What the command says of itself, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

POSITIONALS = {
    "resume": "A run directory.",
    "watch": "A run directory, also one that is being written.",
    "show": "Run directories, or folders that hold some.",
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
def test_a_reader_that_has_enough_is_no_failure(line, finished, tmp_path: Path):
    words = [str(finished("fedasmu").directory) if word == "RUN" else word for word in line]
    code = "import sys, time; from freshet.cli import main; time.sleep(0.5); main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(120), said) == (0, "")


def test_mistakes_of_every_command_begin_alike(command):
    done = command("data", "get", "mnist")
    assert (done.code, done.err.startswith("freshet: data.name")) == (2, True)


def test_choices_and_empty_settings_are_told(command, finished):
    said = " ".join(command("methods", "fedasync").out.split())
    assert "one of constant, polynomial, hinge" in said
    shown = command("show", finished("fedasmu").directory).out
    assert "trace –, measured –," in shown and "local_epochs –," in shown and " ," not in shown
    assert " ," not in command("methods").out
