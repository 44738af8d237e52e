"""Every archived run of a tuned cell has its study's settings, except what its suite varies."""

import tomllib
from pathlib import Path

import pytest

from freshet.experiments.store import archived_runs
from freshet.methods import class_and_preset
from freshet.paper.studies import ABLATED as TAKEN_APART
from freshet.paper.studies import FORMER_FASTEST, NAMED_OPTIONS, NEW_FOLDER, NEW_SETTINGS
from freshet.runs.kept_runs import open_run, runs_below

RESULTS = Path(__file__).parents[2] / "results"
RATES = {"eta_lambda", "eta_sigma", "eta_iota", "eta_gamma", "eta_upsilon"}
#: What a suite varies.
VARIED = {"slots": {"slot"}, "ours": {"controls", "probe", "distance", *RATES}}
#: The options of the variants without their own study, which use FedASMU's.
ABLATED = {
    "fedasmu-da": {"dynamic_server"},
    "fedasmu-fa": {"adaptive_device"},
    "fedasmu-0": {"dynamic_server", "adaptive_device"},
    "fedasmu-published": {"equations", "advantage"},
}
RUNS = sorted(
    path.relative_to(RESULTS) for cell in ("lenet-fmnist", "lenet-cifar10") for path in runs_below(RESULTS / cell)
)


def load(path: Path) -> dict:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def test_there_are_runs_of_both_cells_and_of_all_suites():
    suites = {path.parts[2] for path in RUNS if path.parts[1] == "suites"}
    assert suites == {"ablation", "bandwidth", "devices", "heterogeneity", "ours", "skew", "slots"}
    assert {path.parts[0] for path in RUNS if path.parts[1] == "runs"} == {"lenet-fmnist", "lenet-cifar10"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.as_posix())
def test_a_run_has_what_was_tuned_for_its_method(path: Path):
    run = open_run(RESULTS / path).config()
    name = run["method"]["name"]
    study = load(RESULTS / path.parts[0] / "tune" / ("fedasmu" if name in ABLATED else name) / "best.toml")
    differing = {key for key, value in study["method"].items() if run["method"].get(key) != value} - {"name"}
    varied = VARIED.get(path.parts[2], set()) if path.parts[1] == "suites" else set()
    if name in ABLATED:
        assert differing == ABLATED[name]
    else:
        assert differing <= varied
    assert run["training"]["lr"] == study["training"]["lr"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.as_posix())
def test_a_run_of_the_former_world_has_its_fleet(path: Path):
    run = open_run(RESULTS / path).config()
    assert run["fleet"]["fastest"] == FORMER_FASTEST
    assert run["training"].get("schedule_by", "rounds") == "rounds"
    if "bandwidth" not in path.parts:
        assert (run["fleet"]["up_mbps"], run["fleet"]["down_mbps"]) == (10.0, 50.0)


@pytest.mark.parametrize("cell", TAKEN_APART)
def test_the_runs_of_the_new_world_have_its_settings_and_what_was_tuned(cell: str):
    for path in archived_runs(RESULTS / NEW_FOLDER / cell):
        run = open_run(path).config()
        for key, value in NEW_SETTINGS.items():
            section, _, name = key.partition(".")
            assert run[section][name] == value, path
        method, preset = class_and_preset(run["method"]["name"])
        study = load(RESULTS / NEW_FOLDER / cell / "tune" / method.about.name / "best.toml")
        differing = {key for key, value in study["method"].items() if run["method"].get(key) != value} - {"name"}
        assert differing <= {*preset, *NAMED_OPTIONS}, path
        assert run["training"]["lr"] == study["training"]["lr"], path
        assert run["data"]["train_samples"] == 10_000, path
