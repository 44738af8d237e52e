"""Every baseline in short simulated runs on the digits: it learns, passes its audit, and a forged number is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.errors import ConfigError
from freshet.federation import Federation
from freshet.methods import registry
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import Observer
from freshet.sim.device_memory import DeviceStore
from tests.methods.conftest import SMALL, Simulate
from tests.methods.helpers import ASYNCHRONOUS, SYNCHRONOUS, column, same

BASELINES = (*ASYNCHRONOUS, *SYNCHRONOUS)
#: Options that let a buffer fill, and a first stage end, within a short run.
SHORT: dict[str, dict[str, Any]] = {
    "asofed": {"lambda_": 0.01},
    "ca2fl": {"M": 4},
    "fadas": {"M": 4},
    "fedbuff": {"K": 4},
    "fedac": {"K": 4, "eta_g": 0.03},
    "fedat": {"K": 2, "G": 3},
    "fedcompass": {"alpha": 3.0},
    "fedfa": {"K": 4},
    "fedstaleweight": {"K": 4},
    "masfl": {"gamma": 0.3},
    "pisces": {"first_latency": 4.0},
    "port": {"K": 3},
    "fedsa": {"stage1_updates": 4, "stage1_epochs": 6},
}


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(run).events() if event["kind"] in kinds]


@pytest.mark.parametrize("name", BASELINES)
def test_learns_the_digits_and_passes_its_audit(simulate: Simulate, name: str) -> None:
    result = simulate(name, SHORT.get(name))
    assert result.accuracy[-1] > result.accuracy[0] + (0.05 if name == "asofed" else 0.25)  # slow by design
    assert audit(RunDirectory(result.directory)).problem is None
    assert len(events(result.directory, "aggregate")) >= 4


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_works_under_constant_concurrency_with_losses(simulate: Simulate, name: str) -> None:
    sections = {"run": {"trigger": "concurrency"}, "fleet": {"loss": 0.1, "on_seconds": 60.0, "off_seconds": 20.0}}
    result = simulate(name, SHORT.get(name), 25.0, **sections)
    assert audit(RunDirectory(result.directory)).problem is None
    assert events(result.directory, "lost")
    assert events(result.directory, "aggregate")


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_one_device_at_a_time_is_never_stale(simulate: Simulate, name: str) -> None:
    options = SHORT.get(name, {}) | {"port": {"K": 1}, "fedat": {"G": 1}}.get(name, {})
    result = simulate(name, options, 25.0, run={"trigger": "concurrency", "in_flight": 1, "per_round": 1})
    aggregations = events(result.directory, "aggregate")
    assert aggregations
    assert all(set(column(e, "staleness")) == {1} for e in aggregations)


class Killer(Observer):
    """Ends the run in the middle without a final checkpoint."""

    def on_progress(self, time: float) -> None:
        if time > 14.0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", BASELINES)
def test_a_resumed_run_gives_the_same_bits(simulate: Simulate, tmp_path: Path, name: str) -> None:
    """Buffers, duals, estimates, previous models and mean durations all survive in the checkpoint."""
    sections = {"run": {"checkpoint_every": 5.0}, "fleet": {"ratio": 8.0}}
    whole = simulate(name, SHORT.get(name), 25.0, **sections)
    method = {"name": name} | SHORT.get(name, {})
    federation = Federation(method=method, **{key: SMALL[key] | sections.get(key, {}) for key in SMALL})
    federation.run(25.0, out=tmp_path / "run", observers=[Killer()])
    resumed = federation.resume(tmp_path / "run")
    same(whole.weights, resumed.weights)
    assert audit(RunDirectory(resumed.directory)).problem is None
    logs = [(run.directory / "events.jsonl").read_text() for run in (whole, resumed)]
    assert logs[0] == logs[1]


# ---- the reduction lattice, with training

BITS = [
    ("fedprox", {"mu": 0.0}, "fedavg", None, {}),
    ("moon", {"mu": 0.0}, "fedavg", None, {}),
    ("fedlws", {"beta": 0.0, "tau_min": 0.0}, "fedavg", None, {}),
    ("feddyn", {"alpha": 0.0}, "fedavg", None, {}),  # shards of equal size
    ("fednova", None, "fedavg", None, {}),  # so equal steps
    ("fednova", {"mu": 0.3}, "fedprox", {"mu": 0.3}, {}),
    ("fednova", {"mu": 0.3}, "fedprox", {"mu": 0.3}, {"training": {"momentum": 0.5}}),
    ("fedadam", None, "fedopt", {"server": "adam"}, {}),
    ("fedsa", {"stage1_updates": 0}, "fedasync", None, {"training": {"epochs": 1}}),  # E_k = 1 whatever the estimates
    ("fedbuff", {"K": 1, "exponent": 0.0}, "fedbuff", {"K": 1}, {"run": {"trigger": "concurrency", "in_flight": 1}}),
]


@pytest.mark.parametrize(("left", "options", "right", "others", "sections"), BITS)
def test_reduction_lattice_over_whole_runs(
    simulate: Simulate,
    left: str,
    options: dict[str, Any],
    right: str,
    others: dict[str, Any] | None,
    sections: dict[str, Any],
) -> None:
    ours, theirs = simulate(left, options, **sections), simulate(right, others, **sections)
    same(ours.weights, theirs.weights)
    same(ours.accuracy, theirs.accuracy)


def test_moon_equals_fedavg_until_a_device_returns(simulate: Simulate) -> None:
    ours, theirs = simulate("moon"), simulate("fedavg")
    first = [set(column(e, "device")) for e in events(ours.directory, "aggregate")]
    again = next(number for number, devices in enumerate(first) if devices & set().union(*first[:number]))
    norms = [[e["update_norm"] for e in events(run.directory, "aggregate")] for run in (ours, theirs)]
    assert norms[0][:again] == norms[1][:again]
    assert norms[0][again] != norms[1][again]


def test_device_memories_on_disk_change_no_bit(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASO-Fed keeps two vectors per device: twelve devices need more than 1 MiB."""
    spilled: list[int] = []
    save = DeviceStore._save

    def spy(store: DeviceStore, device: int, memory: Any) -> None:
        spilled.append(device)
        save(store, device, memory)

    roomy = simulate("asofed", SHORT["asofed"])
    monkeypatch.setattr(DeviceStore, "_save", spy)
    tight = simulate("asofed", SHORT["asofed"], run={"device_memory_mb": 1})
    assert spilled
    same(roomy.weights, tight.weights)


# ---- FedSA


def test_fedsa_is_marked_and_its_stages_show_in_the_log(simulate: Simulate) -> None:
    assert registry()["fedsa"].about.reconstructed
    run = simulate("fedsa", SHORT["fedsa"]).directory
    epochs = {e["version"]: e["epochs"] for e in events(run, "trigger")}
    assert all((count == 6) == (version - 1 < 4) for version, count in epochs.items())
    assert min(epochs.values()) >= 1


def test_fedsa_first_stage_is_a_tenth_of_the_uploads_by_default(simulate: Simulate) -> None:
    run = simulate("fedsa", {"stage1_epochs": 3}, 80.0).directory  # as long as any: the time axis is not stretched
    config, epochs = RunDirectory(run).config(), events(run, "trigger")
    limit = config["method"]["stage1_updates"]
    assert limit == pytest.approx(0.1 * RunDirectory(run).summary()["uploads"], rel=0.2)
    assert all(e["epochs"] == 3 for e in epochs if e["version"] - 1 < limit)
    assert min(e["epochs"] for e in epochs if e["version"] - 1 >= limit) < 3
    assert audit(RunDirectory(run)).problem is None


# ---- PORT


def test_overdue_device_finishes_earlier(simulate: Simulate) -> None:
    slow = {"fleet": {"ratio": 20.0, "time": "trip"}, "training": {"epochs": 6}, "run": {"trigger": "concurrency"}}
    runs = [simulate("port", {"K": 2, "omega": 2, "urgent": on}, 60.0, **slow).directory for on in (True, False)]
    assert all(audit(RunDirectory(run)).problem is None for run in runs)
    assert not events(runs[1], "hurry")

    def when(run: Path, kind: str, hurry: dict[str, Any]) -> float:
        trip = (hurry["device"], hurry["trip"])
        return float(next(e["time"] for e in events(run, kind) if (e["device"], e["trip"]) == trip))

    def last_epoch(hurry: dict[str, Any]) -> tuple[int, float]:
        """Return the epoch in which the device receives the request to hurry, and the length of an epoch."""
        start, planned = when(runs[1], "trigger", hurry), when(runs[1], "upload", hurry)
        epoch = (planned - start) / 6  # the links take little
        return 1 + int((hurry["time"] - start) / epoch), epoch

    # the first that can still save an epoch: up to there the two runs are the same
    hurried = next(e for e in events(runs[0], "hurry") if last_epoch(e)[0] < 6)
    epochs, epoch = last_epoch(hurried)
    finished, planned = when(runs[0], "upload", hurried), when(runs[1], "upload", hurried)
    assert hurried["time"] < finished < planned
    # it is the end of an epoch: the time saved is a whole number of epochs
    assert (planned - finished) / (6 - epochs) == pytest.approx(epoch, rel=0.05)  # the links take the rest
    assert len(events(runs[0], "aggregate")) > len(events(runs[1], "aggregate"))


# ---- forged logs


def forge_alpha(event: dict[str, Any]) -> None:
    event["alpha"] *= 1.001


def forge_weight(event: dict[str, Any]) -> None:
    event["contributions"][0]["weight"] *= 1.001


def forge(list_name: str) -> Callable[[dict[str, Any]], None]:
    def change(event: dict[str, Any]) -> None:
        event[list_name][0] *= 1.001

    return change


def forge_r(event: dict[str, Any]) -> None:
    event["r"] += 0.5


def forge_estimate(event: dict[str, Any]) -> None:
    event["estimate"] += 0.25


def forge_share(event: dict[str, Any]) -> None:
    event["c_share"] *= 1.001


def forge_cached(event: dict[str, Any]) -> None:
    event["cached"][0] = 1 - event["cached"][0]


def forge_tau_max(event: dict[str, Any]) -> None:
    event["tau_max"] += 1


def forge_count(name: str) -> Callable[[dict[str, Any]], None]:
    def change(event: dict[str, Any]) -> None:
        event[name] += 1

    return change


def forge_number(name: str) -> Callable[[dict[str, Any]], None]:
    def change(event: dict[str, Any]) -> None:
        event[name] *= 1.001

    return change


def forge_queue(event: dict[str, Any]) -> None:
    event["queued"] = event["queued"][::-1]


FORGERIES = [
    ("fedasync", forge_alpha),
    ("asofed", forge_alpha),
    ("asofed", forge_r),
    ("fedsa", forge_alpha),
    ("fedsa", forge_estimate),
    ("fedbuff", forge_weight),
    ("fedbuff", forge("discounts")),
    ("fedbuff", forge_alpha),
    ("port", forge_weight),
    ("port", forge("s")),
    ("port", forge("c")),
    ("fedavg", forge_weight),
    ("fedprox", forge_weight),
    ("moon", forge_weight),
    ("feddyn", forge_weight),
    ("fedlws", forge_weight),
    ("fedlws", forge("gamma")),
    ("fedlws", forge("tau")),
    ("scaffold", forge_weight),
    ("scaffold", forge_alpha),
    ("scaffold", forge_share),
    ("fedopt", forge_weight),
    ("fedopt", forge_alpha),
    ("fednova", forge_weight),
    ("fednova", forge("a")),
    ("fednova", forge("steps")),
    ("fednova", forge_alpha),
    ("ca2fl", forge_weight),
    ("ca2fl", forge_alpha),
    ("ca2fl", forge_cached),
    ("fadas", forge_weight),
    ("fadas", forge_alpha),
    ("fadas", forge_tau_max),
    ("ace", forge_weight),
    ("ace", forge_alpha),
    ("ace", forge_count("cached")),
    ("aced", forge_count("cached")),
    ("asyncfeded", forge_alpha),
    ("asyncfeded", forge_weight),
    ("asyncfeded", forge_number("gamma")),
    ("asyncfeded", forge_count("next_epochs")),
    ("fedfa", forge_weight),
    ("fedfa", forge_alpha),
    ("fedfa", forge_queue),
    ("fedstaleweight", forge_weight),
    ("fedstaleweight", forge("sigma")),
    ("fedac", forge_weight),
    ("fedac", forge("r")),
    ("fedac", forge_alpha),
    ("fedat", forge_weight),
    ("fedat", forge_alpha),
    ("fedat", forge_count("tier")),
    ("fedcompass", forge_weight),
    ("fedcompass", forge_alpha),
    ("pisces", forge_weight),
    ("pisces", forge_alpha),
    ("pisces", forge_count("waited")),
    ("safa", forge_weight),
    ("safa", forge_alpha),
    ("safa", forge("samples")),
    ("masfl", forge_weight),
    ("masfl", forge_alpha),
    ("fedexp", forge_weight),
    ("fedexp", forge_alpha),
    ("fedacg", forge_weight),
    ("fedacg", forge_number("lambda")),
    ("mifa", forge_weight),
    ("mifa", forge_cached),
    ("fedstale", forge_weight),
    ("fedstale", forge("p")),
    ("fedvarp", forge_number("beta")),
]


@pytest.mark.parametrize(("name", "change"), FORGERIES)
def test_audit_names_the_line_of_a_forged_number(
    simulate: Simulate, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    run = tmp_path / "forged"
    shutil.copytree(simulate(name, SHORT.get(name)).directory, run)
    log = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    number, event = [(i, e) for i, e in enumerate(log, 1) if e["kind"] == "aggregate"][2]
    change(event)
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    problem = audit(RunDirectory(run)).problem
    assert problem is not None
    assert f"line {number} (aggregate)" in problem


# ---- a method of one's own


def test_own_method_is_one_class(simulate: Simulate) -> None:
    result = simulate("tests.methods.contract_methods:Half")
    assert result.accuracy[-1] > result.accuracy[0] + 0.25
    found = audit(RunDirectory(result.directory))
    assert (found.problem, found.audited) == (None, False)
    assert {e["alpha"] for e in events(result.directory, "aggregate")} == {0.5}


# ---- from the command line

CLI = CliRunner()


def test_all_methods_are_listed_with_their_kind_and_citation() -> None:
    assert set(registry()) == {*BASELINES, "fedrep", "fedasmu", "fedssmu"}
    listing = CLI.invoke(app, ["methods"], env={"COLUMNS": "240"})
    assert listing.exit_code == 0
    for method in registry().values():
        assert method.about.name in listing.output
        assert method.about.citation in listing.output
    for name in ("fedsa", "fedac", "masfl"):
        assert f"{name} [R]" in listing.output
    for name in BASELINES:
        described = CLI.invoke(app, ["methods", name], env={"COLUMNS": "240"}).output
        for key, field in registry()[name].Options.model_fields.items():
            assert key in described
            assert field.description and field.description in described


@pytest.mark.parametrize("name", BASELINES)
def test_freshet_run_needs_only_the_method(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    outcome = CLI.invoke(
        app, ["run", "--method", name, "--until", "12", "-s", "run.executor=serial", "-q", "-o", str(out)]
    )
    assert outcome.exit_code == 0, outcome.output
    assert RunDirectory(out).summary()["status"] == "finished"


def test_moon_refuses_a_module_without_features() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    with pytest.raises(ConfigError, match=r"model.name: MOON needs a module with features"):
        Federation(model=plain, method="moon", devices=4, data={"train_samples": 100})
