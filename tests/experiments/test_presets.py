"""``freshet cells NAME``: every choice, and whose it is."""

import pytest
import typer
from typer.testing import CliRunner

from freshet.cli import inspect
from freshet.config import resolve
from freshet.paper.cells import CELLS, all_method_choices, cell_tables, choices


@pytest.mark.parametrize("name", ["lenet-cifar10", "textcnn-imdb"])
def test_what_the_paper_states_is_its_own_and_all_else_is_ours(name):
    cell = CELLS[name]
    found = {choice.name: choice for choice in choices(cell)}
    stated = {key for key, choice in found.items() if choice.stated}
    assert stated == {
        "rounds", "training.lr", "fleet.devices", "fleet.ratio", "data.name", "data.partition", "model.name",
        "run.target", "run.trigger", "run.per_round", "run.period",
    }  # fmt: skip
    ours = {"training.epochs", "training.batch_size", "training.lr_decay", "fleet.fastest", "fleet.up_mbps"}
    ours |= {"fleet.down_mbps", "fleet.up_latency", "fleet.down_latency", "data.concentration", "data.min_samples"}
    ours |= {"run.in_flight", "run.until", "run.eval_every"}
    assert ours <= found.keys() - stated
    assert ("data.vocabulary" in found) is (name == "textcnn-imdb")
    config = resolve(cell_tables(cell, "fedasmu"))
    assert (found["run.until"].value, found["training.lr"].value) == (config.run.until, cell.lr)


def test_initial_controls_are_ours_and_rates_the_papers():
    found = all_method_choices(CELLS["lenet-cifar10"])
    for method in ("fedasmu", "fedssmu"):
        whose = {choice.name: choice.stated for choice in found[method]}
        ours = ("lambda0", "sigma0", "iota0", "gamma0", "upsilon0", "mu_alpha", "epsilon", "phi_q", "psi", "rho")
        assert not any(whose[name] for name in ours)
        assert all(whose[name] for name in ("eta_lambda", "eta_iota", "eta_upsilon", "eta_rl", "tau_max"))
    assert not any(choice.stated for method in ("fedbuff", "fedlws") for choice in found[method])


def test_the_command_says_it_all(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    app = typer.Typer()
    app.command("cells")(inspect.cells)
    app.command("models")(inspect.models)
    done = CliRunner().invoke(app, ["cells", "cnn-cifar10"])
    assert done.exit_code == 0
    text = done.output
    assert "500 synchronous rounds of" in text and "lambda0" in text and "in_flight" in text
    row = next(line for line in text.splitlines() if line.startswith("training.lr_decay"))
    assert row.split() == ["training.lr_decay", "0.999", "ours"]
    assert next(line for line in text.splitlines() if line.startswith("fleet.devices")).split()[-1] == "paper"
    assert next(line for line in text.splitlines() if line.startswith("feddyn  ")).split() == [
        "feddyn",
        "0.508",
        "43974",
    ]
