"""Methods that exchange more than a model down and a model up, with real processes."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from freshet.config import load_tables, resolve
from freshet.flower import commands
from freshet.flower.running import LocalRun
from freshet.flower.wire import from_bytes
from tests.flower.local_federation import events, finished_run, install_stalling_app, passes_audit, tables, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_fedssmu_by_messages(start: Callable[..., LocalRun]) -> None:
    """Fresh models by message need only the SuperLink's port, and two messages per trip."""
    local = start(tables("fedssmu", 2, 2), server={"fresh": "messages"})
    summary = finished_run(local).summary()
    assert summary["rounds"] == 2 and summary["requests"] >= 1 and summary["messages"] == 2 * summary["trips"]


def test_compressed_links_and_fresh_layers(start: Callable[..., LocalRun]) -> None:
    """Models go down as int8 differences and up as top-k, and the service answers with some layers."""
    settings = tables("fedasmu", 2, 4)
    settings["method"] |= {"slot": 2}
    settings["links"] = {"down": "int8", "up": "topk", "fresh": "layers"}
    local = start(settings)
    summary = finished_run(local).summary()
    assert summary["merges"] >= 1 and summary["rejected"] == summary["lost"] == 0
    assert len({event["bytes"] for event in events(local, "upload")}) == 1
    sent = [event for event in events(local, "note") if event["about"] == "fresh layers"]
    assert len(sent) >= summary["merges"] and passes_audit(local.server.out)


def test_own_training_loop(start: Callable[..., LocalRun]) -> None:
    """Devices name their loop. It merges fresh models from the service, and its metrics reach the log."""
    settings = tables("fedasmu", 2, 3)
    settings["training"] = settings.get("training", {}) | {"trainer": "custom"}
    local = start(settings, devices=partial(commands.supernode, trainer="tests.test_own_trainer:my_train"))
    assert finished_run(local).summary()["requests"] >= 1
    assert any("train_loss" in event for event in events(local, "upload"))


def test_port_hurries_an_overdue_device(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """Device 1 stalls before its first epoch. Told to hurry, it uploads after one epoch instead of three. It stalls in
    its second trip as well, so that its memory is that of the first."""
    install_stalling_app(tmp_path / "deploy", tmp_path / "holds", "before_1", "before_1_2")
    settings = tables("port", 2, 0, until=1e5)
    settings["method"] |= {"K": 1, "omega": 0}
    local = start(settings)
    wait_until(local, lambda: events(local, "hurry", device=1), "the hurry")
    wait_until(local, (tmp_path / "holds" / "hurried_1").exists, "the device receiving it")
    (tmp_path / "holds" / "before_1").unlink()
    wait_until(local, lambda: events(local, "upload", device=1), "its upload")
    wait_until(local, lambda: events(local, "aggregate")[-1]["contributions"], "an aggregation")
    (kept,) = (local.folder.root / "memory" / "node_1").glob("memory.*.safetensors")
    memory = from_bytes(kept.read_bytes())
    config = resolve(load_tables(local.folder.root / "federation.toml"))
    per_epoch = math.ceil(memory["answer"]["samples"] / config.training.batch_size)
    assert memory["answer"]["upload"]["steps"] == per_epoch < config.training.epochs * per_epoch
    local.stop()
    assert events(local, "upload", device=1)[0]["trip"] == 1 and passes_audit(local.server.out)
