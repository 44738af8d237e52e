"""A run that is resumed with other software: refused with a sentence, or it says so ever after."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation
from freshet.core.method import LocalRule, Method
from freshet.errors import RunError
from freshet.methods import class_and_preset, method_options
from freshet.methods.fedavg import FedAvg
from freshet.methods.fedprox import FedProx
from freshet.runs import software as module
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.software import accept_software, differences, software, source_hash
from freshet.runs.summary import remarks

SOURCE = """
from freshet import About, Method
from freshet.core.events import Contribution
from freshet.core.method import Aggregate
from freshet.core.vectors import mix


class Mine(Method):
    about = About("mine", "async", "Mine", "x")

    def receive(self, server, upload, trip):
        new = mix(server.weights, upload.weights, {share})
        return Aggregate(new, [Contribution(upload.device, trip.base, server.staleness(trip), {share})])
"""


def stop_at(seconds: float) -> Any:
    from freshet import Observer, Stop

    class Stopping(Observer):
        def on_progress(self, time: float) -> None:
            if time >= seconds:
                raise Stop("enough")

    return Stopping()


def federation(folder: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> Federation:
    """A federation whose method has this source."""
    (folder / "mine_method.py").write_text(SOURCE.format(share=share))
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("mine_method", None)
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    data, run = {"train_samples": 200, "test_samples": 100}, {"until": 100.0, "checkpoint_every": 5.0}
    return Federation(method="mine_method:Mine", devices=4, data=data, run=run)


def test_changed_method_is_not_resumed_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave other bits, and nothing said so."""
    out = tmp_path / "run"
    federation(tmp_path, monkeypatch, 0.5).run(out=out, observers=[stop_at(30.0)])
    before = (out / "events.jsonl").read_bytes()
    changed = federation(tmp_path, monkeypatch, 0.25)
    with pytest.raises(RunError, match=r"computed with other software \(the method's source\).*--accept-changes"):
        changed.resume(out)
    assert (out / "events.jsonl").read_bytes() == before, "nothing was cut off"
    stopped = changed.resume(out, accept_changes=True, observers=[stop_at(60.0)])
    assert stopped.summary["changes"] == ["the method's source"]
    ended = changed.resume(out)  # the same source again
    assert ended.summary["changes"] == ["the method's source"], "the run says so ever after"
    assert any("was resumed with other software (the method's source)" in line for line in remarks(ended.summary, []))
    notes = [event for event in RunDirectory(out).events() if event.get("about") == "software"]
    assert [note["changes"] for note in notes] == [["the method's source"]]
    assert audit(RunDirectory(out)).problem is None


def test_same_software_resumes_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = federation(tmp_path, monkeypatch, 0.5).run(out=tmp_path / "whole")
    federation(tmp_path, monkeypatch, 0.5).run(out=tmp_path / "run", observers=[stop_at(30.0)])
    again = federation(tmp_path, monkeypatch, 0.5).resume(tmp_path / "run")
    assert "changes" not in again.summary
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_versions_of_what_computes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = software(FedAvg, LocalRule())
    assert set(now) == {"freshet", "torch", "numpy", "method"} and all(now.values())
    old = now | {"torch": "2.6.0", "freshet": "0.1"}
    assert differences(old, now) == [f"freshet 0.1 -> {now['freshet']}", f"torch 2.6.0 -> {now['torch']}"]
    assert differences(now, now) == differences({}, now) == differences({"method": ""}, now) == []


def test_source_is_that_of_the_method_and_its_rule() -> None:
    assert source_hash(FedAvg.__mro__) != source_hash(FedProx.__mro__)
    assert source_hash([LocalRule, Method]) == source_hash([]), "Freshet's version stands for these"
    foreign = type("Typed", (Method,), {"__module__": "no such module"})
    assert source_hash([foreign]) == "", "typed in an interactive session"


def test_source_of_a_rule_that_is_wrapped_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAsync with fresh models still trains by the proximal rule of another file."""
    seen: list[list[type]] = []
    monkeypatch.setattr("freshet.runs.software.source_hash", lambda classes: seen.append(list(classes)) or "")
    method, _ = class_and_preset("fedasync")
    software(method, method.rule(method_options("fedasync", {"fresh": "rebase"})))
    assert {"Rebasing", "Proximal"} <= {kind.__name__ for kind in seen[0]}


def test_checkpoint_of_an_older_version_is_resumed(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    accept_software(tree, {"freshet": "9"}, accept=False, directory=tmp_path, remedy="")
    assert tree == {"changes": [], "new_changes": []} and module.NOTE_ABOUT == "software"
