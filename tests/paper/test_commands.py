"""The suites of ``freshet paper`` as a user meets them."""

import json
import re

import pytest
from typer.testing import CliRunner

from freshet.cli import grids
from freshet.cli.app import app
from freshet.errors import FreshetError
from freshet.experiments import compare
from freshet.paper.suites import SUITES
from tests.experiments.helpers import TINY

SMALL = [word for setting in TINY for word in ("-s", setting)]


def test_paper_lists_its_commands():
    done = CliRunner().invoke(app, ["paper"])
    for name in (*SUITES, "theory", "results"):
        assert re.search(rf"\b{name}\b", done.output), name


def test_an_unknown_suite_is_refused(command):
    done = command("paper", "tables")
    assert done.exit_code == 2 and "No such command 'tables'" in done.output


@pytest.mark.parametrize("name", SUITES)
def test_the_command_of_a_suite_lists_what_would_run(command, name):
    done = command("paper", name, "--scale", 0.1, "--seeds", 1, "--list")
    assert done.exit_code == 0
    assert f"{name}: {SUITES[name].title}, SCALED DOWN to 0.1" in done.output
    count = len(SUITES[name].cells) * len(SUITES[name].settings) * len(SUITES[name].methods)
    assert f"{count} runs, {count} to do, in runs/paper" in done.output


@pytest.mark.parametrize("name", SUITES)
def test_only_a_suite_of_several_cells_lets_you_choose_cells(command, name):
    done = command("paper", name, "--cells", "lenet-cifar10", "--scale", 0.02, "--list")
    assert ("No such option: --cells" in done.output) is (len(SUITES[name].cells) == 1)


def test_the_number_of_workers_is_a_setting(command, monkeypatch):
    seen = []
    monkeypatch.setattr(grids, "work", lambda grid, **_: seen.append(grid))
    command("paper", "slots", "--scale", 0.02, "--seeds", 1, "--workers", 3)
    assert {job.config.run.workers for job in seen[0].jobs} == {3}


def test_a_wrong_scale_is_one_sentence(command):
    with pytest.raises(FreshetError) as caught:
        command("paper", "slots", "--scale", "2")
    assert "--scale" in str(caught.value) and "\n" not in str(caught.value)


def test_slots_says_its_scale_and_its_runs(command):
    done = command("paper", "slots", "--scale", 0.05, "--seeds", 2, "--list")
    assert done.exit_code == 0
    assert "SCALED DOWN to 0.05" in done.output and "8 runs, 8 to do" in done.output


def test_a_scaled_suite_runs_and_says_its_scale_everywhere(command, tmp_path):
    line = ["paper", "slots", "--scale", 0.02, "--seeds", 1, "-m", "fedasmu,fedasmu@slot=h1"]
    done = command(*line, "-s", "data.name=digits", *SMALL)
    assert done.exit_code == 0
    assert done.output.count("SCALE") >= 3 and "(scale 0.02)" in done.output
    record = json.loads((tmp_path / "runs/paper/slots-scale0.02.json").read_text())
    assert record["scale"]["scale"] == 0.02
    for ending in ("csv", "png", "pdf"):
        assert (tmp_path / f"runs/paper/slots-scale0.02.{ending}").stat().st_size > 100
        assert f"slots-scale0.02.{ending}" in done.output.replace("\n", "")
    assert "the learned slot over H1" in done.output


def test_published_numbers_are_printed_beside_ours(command, monkeypatch):
    def nothing(job, *rest):
        raise RuntimeError("no time")

    monkeypatch.setattr(compare, "execute", nothing)
    done = command("paper", "table", "--cells", "lenet-fmnist", "-m", "fedasmu,fedavg", "--seeds", 1)
    row = next(line for line in done.output.splitlines() if line.startswith("fedavg") and "1 failed" in line)
    assert "0.78" in row and "97,692" in row
    assert "names no unit" in done.output
