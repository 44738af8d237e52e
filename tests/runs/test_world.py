"""world.json: fleet and data of a run, written once, checked when it is read."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation, Result
from freshet.core.about import Curve
from freshet.errors import RunError
from freshet.runs.world import RunWorld, read_world, write_world
from freshet.runs.writer import Observer
from freshet.sim.fleet import Fleet

WORLD = RunWorld(
    data="digits",
    classes=["cat", "dog", "<b>"],
    train_samples=11,
    test_samples=4,
    model_bytes=2_600,
    train_seconds=[10.0, 0.1],
    up_rate=[1e6, float("inf")],
    down_rate=[2e6, 4e6],
    samples=[5, 6],
    label_counts=[[5, 0, 0], [1, 2, 3]],
    up_latency=0.5,
    down_latency=0.25,
    on_seconds=30.0,
    off_seconds=10.0,
    loss=1.0,
    aside=["run.workers"],
    curves=[Curve("gamma", "merge", "gamma_after", "γ", "scale of the fresh model")],
)


def test_a_world_reads_back_bit_for_bit(tmp_path: Path) -> None:
    write_world(tmp_path, WORLD)
    assert read_world(tmp_path) == WORLD
    assert [path.name for path in tmp_path.iterdir()] == ["world.json"], "written as a whole, nothing left behind"


def test_seconds_on_the_links() -> None:
    assert (WORLD.up(0, 1_000_000), WORLD.down(1, 1_000_000)) == (1.5, 0.5)
    assert WORLD.up(1, 10**9) == 0.5, "a link without limit"
    later = replace(WORLD, start_seconds=[3.0, 4.0])
    assert later.seconds_to_first_step(0) - WORLD.seconds_to_first_step(0) == 3.0 and WORLD.seconds_to_first_step(
        1
    ) == WORLD.down(1, 2_600)


def test_a_run_describes_its_fleet_and_data(finished: Callable[[str], Result]) -> None:
    result = finished("fedasmu")
    world = read_world(result.directory)
    assert world is not None
    assert (world.data, world.train_samples, world.test_samples, len(world)) == ("digits", 240, 120, 8)
    assert world.model_bytes == 4 * result.weights.size
    assert (min(world.train_seconds), max(world.train_seconds)) == (4.0, 20.0)
    assert set(world.up_rate) == {0.05e6 / 8} and set(world.down_rate) == {0.02e6 / 8}
    assert (world.up_latency, world.on_seconds, world.loss) == (0.05, 0.0, 0.0)
    assert sum(world.samples) == 240 and world.classes == [str(digit) for digit in range(10)]
    assert "run.workers" in world.aside and "run.seed" not in world.aside


def test_a_fleet_and_shards_given_from_python(federate: Callable[..., Federation], tmp_path: Path) -> None:
    seconds = np.linspace(1.0, 8.0, 8)
    fleet = Fleet(seconds, np.full(8, np.inf), np.arange(1.0, 9.0) * 1e4, loss=0.5, on_seconds=90.0, off_seconds=9.0)
    federation = federate("fedasync", fleet=fleet, shards=np.array_split(np.arange(240), 8))
    world = read_world(federation.run(10, out=tmp_path / "run").directory)
    assert world is not None
    assert (world.train_seconds, world.down_rate) == (seconds.tolist(), fleet.down_rate.tolist())
    assert set(world.up_rate) == {float("inf")}
    assert (world.loss, world.on_seconds, world.off_seconds) == (0.5, 90.0, 9.0)
    labels = federation.dataset.y_train
    assert world.label_counts == [np.bincount(labels[30 * d : 30 * d + 30], minlength=10).tolist() for d in range(8)]


class Crash(Exception):
    """Ends a run as a kill would."""


class Crasher(Observer):
    def on_progress(self, time: float) -> None:
        if time >= 20.0:
            raise Crash


def test_it_is_written_at_the_start_and_a_resume_does_not_change_it(
    federate: Callable[..., Federation], tmp_path: Path
) -> None:
    federation = federate("fedasmu", run={"checkpoint_every": 5.0})
    with suppress(Crash):
        federation.run(40, out=tmp_path / "run", observers=[Crasher()])
    path = tmp_path / "run" / "world.json"
    before = (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
    assert federation.resume(tmp_path / "run").summary["status"] == "finished"
    assert (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes()) == before


# ---- nothing in it is trusted


def test_a_run_without_world_json_has_no_world(tmp_path: Path) -> None:
    assert read_world(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("data", 7, "data must be text"),
        ("classes", "abc", "classes must be a list"),
        ("classes", ["a", "b"], "label_counts must be a list of 2"),
        ("classes", ["a", "b", 3], "classes must be text"),
        ("train_samples", -1, "train_samples must be a whole number, not negative"),
        ("test_samples", 4.0, "test_samples must be a whole number, not negative"),
        ("model_bytes", True, "model_bytes must be a whole number, not negative"),
        ("train_seconds", 10.0, "train_seconds must be a list with one number per device"),
        ("train_seconds", [], "train_seconds must be a list with one number per device"),
        ("train_seconds", [1.0, None], "train_seconds must be a finite number, not negative"),
        ("train_seconds", [1.0, 2.0, 3.0], "label_counts must be a list of 3"),
        ("up_rate", [1.0], "up_rate must be a list of 2"),
        ("up_rate", [1.0, 0], "up_rate must be a positive number, or null for no limit"),
        ("down_rate", [1.0, "2"], "down_rate must be a positive number, or null for no limit"),
        ("samples", [5, 7], "samples must be the sum of label_counts for each device"),
        ("label_counts", [[5, 0, 0]], "label_counts must be a list of 2"),
        ("label_counts", [[5, 0], [1, 2, 3]], "label_counts must be a list of 3"),
        ("label_counts", [[5, 0, 0], [1, 2, -3]], "label_counts must be a whole number, not negative"),
        ("label_counts", [[5, 0, 0], {"1": 2}], "label_counts must be a list of 3"),
        ("up_latency", -0.1, "up_latency must be a finite number, not negative"),
        ("off_seconds", None, "off_seconds must be a finite number, not negative"),
        ("loss", 1.5, "loss must be a number from 0 to 1"),
        ("aside", [1], "aside must be text"),
        ("sample_shape", "8x8", "sample_shape must be a list"),
        ("outputs", -1, "outputs must be a whole number, not negative"),
        ("fingerprint", [], "fingerprint must be an object with one text for each part"),
        ("fingerprint", {"data": 1}, "fingerprint must be text"),
    ],
)
def test_an_invalid_value_is_named(tmp_path: Path, key: str, value: Any, problem: str) -> None:
    write_world(tmp_path, WORLD)
    found = json.loads((tmp_path / "world.json").read_text())
    (tmp_path / "world.json").write_text(json.dumps(found | {key: value}))
    with pytest.raises(RunError) as caught:
        read_world(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'world.json'} cannot be used: {problem}"


def test_every_key_is_required_and_others_are_ignored(tmp_path: Path) -> None:
    write_world(tmp_path, WORLD)
    path = tmp_path / "world.json"
    found = json.loads(path.read_text())
    later = {"metric", "direction", "mean", "std", "sample_shape", "outputs", "vocabulary", "pad_id", "fingerprint"}
    later |= {"start_seconds"}
    assert later < found.keys(), "what a run of an earlier version has not"
    path.write_text(json.dumps({key: value for key, value in found.items() if key not in later}))
    assert read_world(tmp_path) == WORLD
    for key in found.keys() - later:
        path.write_text(json.dumps({name: value for name, value in found.items() if name != key}))
        with pytest.raises(RunError, match=f"cannot be used: {key} is missing"):
            read_world(tmp_path)
    path.write_text(json.dumps(found | {"of a later version": 1}))
    assert read_world(tmp_path) == WORLD


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "world.json").write_bytes(content)
    with pytest.raises(RunError, match=r"world\.json cannot be used: ") as caught:
        read_world(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"run\.out.*world\.json cannot be written"):
        write_world(tmp_path / "nowhere", replace(WORLD, loss=0.0))
