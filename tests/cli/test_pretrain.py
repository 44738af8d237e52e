"""``freshet pretrain``: the slot selector learns from the logs of earlier runs."""

import json
from pathlib import Path

import pytest

from freshet.cli.app import app
from freshet.runs.reader import RunDirectory

SMALL = ("--executor", "serial", "-s", "fleet.devices=12", "-s", "data.train_samples=200", "-s", "run.eval_every=200")


@pytest.fixture
def freshet(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        app([str(word) for word in words], standalone_mode=False)
        return capsys.readouterr().out

    return call


def first_slots(directory: Path) -> list[int]:
    """Slots of the devices' first trips that the meta model proposed."""
    return [e["slot"] for e in RunDirectory(directory).events() if e["kind"] == "request" and e["slot_by"] == "meta"]


def pay_only(directory: Path, slot: int) -> None:
    """Rewrite the rewards of a log: asking at one slot pays, asking elsewhere costs."""
    log = directory / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["kind"] == "merge":
            event["reward"] = 0.01 if event["slot"] == slot else -0.01
    log.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(("selector", "rate", "untrained", "paid"), [("printed", 2.0, 5, 3), ("shaped", 0.001, 3, 5)])
def test_after_pretraining_first_trips_ask_at_the_slot_that_paid(
    freshet, tmp_path, selector: str, rate: float, untrained: int, paid: int
) -> None:
    run = ("run", "-m", "fedasmu", "--until", "200s", "-q", *SMALL, "-s", f"method.selector={selector}")
    freshet(*run, "-o", "teacher", "-s", 'method.slot="random"')
    pay_only(Path("teacher"), paid)
    said = freshet("pretrain", "teacher", "--rate", rate, "--passes", "20", "--selector", selector)
    assert "slot probabilities before  1: 0." in said and "slot probabilities  after" in said
    assert f"first trips will ask at slot {paid}" in said
    freshet(*run, "-o", "untrained", "-s", "method.meta_from=none")
    freshet(*run, "-o", "trained", "-s", 'method.meta_from="meta.safetensors"')
    assert set(first_slots(Path("untrained"))[:5]) == {untrained}
    assert set(first_slots(Path("trained"))[:5]) == {paid}


def test_more_passes_and_a_higher_rate_teach_more(freshet) -> None:
    freshet("run", "-m", "fedasmu", "--until", "200s", "-q", *SMALL, "-o", "teacher", "-s", 'method.slot="random"')
    pay_only(Path("teacher"), 5)

    def last_share(*words: object) -> float:
        after = next(
            line
            for line in freshet("pretrain", "teacher", "--selector", "shaped", *words).splitlines()
            if " after " in line
        )
        return float(after.rpartition("5: ")[2])

    little = last_share("--rate", "1e-4", "--passes", "1")
    assert little < last_share("--rate", "1e-4", "--passes", "5")
    assert little < last_share("--rate", "1e-3", "--passes", "1")
