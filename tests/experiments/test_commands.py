"""``freshet compare`` and ``freshet tune`` as a user meets them."""

import json

import pytest

from freshet.errors import FreshetError
from freshet.experiments import compare

from .helpers import TINY

SMALL = [word for setting in TINY for word in ("-s", setting)]


def test_compare_prints_a_table_writes_files_and_repeats_nothing(command, monkeypatch, tmp_path):
    line = ["compare", "-m", "fedasmu,fedsa,fedavg", "--seeds", 2, "--target", 0.2, *SMALL]
    done = command(*line)
    assert done.exit_code == 0
    assert "fedsa [R]" in done.output and "to 0.2" in done.output
    record = json.loads((tmp_path / "runs/compare/comparison.json").read_text())
    assert [entry["finished"] for entry in record["worlds"][0]["lines"]] == [2, 2, 2]
    assert (tmp_path / "runs/compare/comparison.csv").read_text().startswith("world,method")
    monkeypatch.setattr(compare, "execute", None)
    assert command(*line).exit_code == 0
    listed = command(*line, "--list")
    assert "6 runs, 0 to do" in listed.output


def test_compare_says_that_its_folder_holds_runs_of_another_comparison(command):
    line = ["compare", "-m", "fedavg", "--seeds", 1, *SMALL]

    def said(*more):
        return " ".join(command(*line, *more).output.split())

    assert "not counted here" not in said()
    assert "holds another run, which is not counted here" in said("-s", "training.lr=0.01")
    assert "holds 2 other runs, which are not counted here" in said("-s", "training.lr=0.02")
    assert "not counted here" not in said("-o", "runs/apart")


def test_compare_says_how_much_faster_than_the_reference(command, tmp_path):
    line = ["compare", "-m", "fedasmu,fedasync,fedavg", "--seeds", 1, "--target", 0.2, *SMALL]
    done = command(*line)
    assert "time vs reference: 1.60x = takes 1.6 times as long" in done.output
    assert "fedasync, fedavg against fedasmu" in done.output
    assert "fedasmu, fedasync against fedavg" in command(*line, "--reference", "fedavg").output
    header, *rows = (tmp_path / "runs/compare/comparison.csv").read_text().splitlines()
    assert {"reference", "time_raw_vs_reference", "time_raw_bound", "accuracy_vs_reference_p"} <= set(header.split(","))
    assert len(rows) == 3
    with pytest.raises(FreshetError, match="--reference"):
        command(*line, "--reference", "port")


def test_the_length_of_a_cell_is_printed(command):
    done = command("compare", "-m", "fedasmu", "--cell", "lenet-fmnist", "--seeds", 1, "--list")
    assert "500 synchronous rounds of 880.6 s" in done.output.replace("\n", " ")


def test_a_failed_run_is_shown_and_the_exit_code_says_so(command, monkeypatch):
    real = compare.execute

    def broken(job, *rest):
        if job.entry.label == "fedavg":
            raise MemoryError("full")
        return real(job, *rest)

    monkeypatch.setattr(compare, "execute", broken)
    line = ["compare", "-m", "fedasmu,fedavg", "--seeds", 1, *SMALL]
    done = command(*line)
    assert done.exit_code == 1
    assert "1 failed" in done.output and "MemoryError: full" in done.output and "--retry" in done.output
    monkeypatch.setattr(compare, "execute", real)
    assert command(*line).exit_code == 1
    assert command(*line, "--retry").exit_code == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compare", "-m", "nonsense"], "method.name"),
        (["compare", "-m", "fedavg", "--seeds", "x"], "--seeds"),
        (["compare", "-m", "fedavg", "--cell", "x"], "--cell"),
        (["compare", "-m", "fedavg", "--tuned", "nowhere"], "--tuned: nowhere has no best.toml"),
        (["compare", "-m", "fedavg,fedprox", "-s", "method.mu=1"], "fedavg.mu=1 instead of"),
    ],
)
def test_a_mistake_is_one_sentence(command, words, problem):
    with pytest.raises(FreshetError) as caught:
        command(*words)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_an_executor_that_does_not_exist_names_those_that_do(command):
    done = command("compare", "-m", "fedavg", "--executor", "magic")
    assert done.exit_code == 2
    assert all(name in done.output for name in ("magic", "auto", "serial", "processes", "ray"))


def test_tune_makes_a_config_that_compare_takes(command, tmp_path):
    pytest.importorskip("optuna")
    for method, trials in (("fedprox", 2), ("fedavg", 1)):
        done = command("tune", "-m", method, "--trials", trials, "--seeds", 1, "--out", f"t/{method}", *SMALL)
        assert done.exit_code == 0, done.output
        assert f"t/{method}/best.toml" in done.output
    done = command(
        "compare", "-m", "fedprox,fedavg", "--seeds", 1, "--tuned", "t/fedprox", "--tuned", "t/fedavg", *SMALL
    )
    assert done.exit_code == 0
    assert "fedprox 2 trials x 1 seeds of 24 s" in done.output and "UNEQUAL BUDGETS" in done.output
    assert "NOT TUNED" not in done.output
    listed = command("compare", "-m", "fedavg,fedbuff", "--list", "--tuned", "t/fedavg", "--tuned", "t/fedprox", *SMALL)
    assert "fedprox" not in listed.output and "UNEQUAL" not in listed.output, "only what is used here"
    assert "NOT TUNED: fedbuff" in listed.output
    with pytest.raises(FreshetError, match="two folders are for fedavg"):
        command("compare", "-m", "fedavg", "--list", "--tuned", "t/fedavg", "--tuned", "t/fedavg", *SMALL)
    (tmp_path / "t/fedavg/best.toml").write_bytes((tmp_path / "t/fedprox/best.toml").read_bytes())
    with pytest.raises(FreshetError, match=r"t/fedavg .* best\.toml is for fedprox and tuning\.json for fedavg; give"):
        command("compare", "-m", "fedprox", "--list", "--tuned", "t/fedavg", *SMALL)
    record = json.loads((tmp_path / "runs/compare/comparison.json").read_text())
    best = json.loads((tmp_path / "t/fedprox/tuning.json").read_text())["values"]
    assert record["worlds"][0]["lines"][0]["options"]["mu"] == best["method.mu"]
