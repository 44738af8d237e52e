"""Random damage to everything that is read: a result or one sentence, never a traceback, never a hang.

``make fuzz`` sets FRESHET_FUZZ to try many times as much.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freshet.config import load_tables, override, resolve
from freshet.errors import FreshetError
from freshet.report.page import report
from freshet.report.reading import read
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.world import read_world
from freshet.sim.traces import read_trace

TRIES = int(os.environ.get("FRESHET_FUZZ", "1"))
fuzz = settings(
    max_examples=25 * TRIES,
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def bears(call: Callable[[], Any]) -> None:
    """The call gives a result, or one sentence."""
    try:
        call()
    except FreshetError as error:
        assert str(error)


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cut out, double, flip or insert some bytes."""
    kind, place = draw(st.sampled_from(["cut", "double", "flip", "insert", "end"])), draw(st.floats(0, 1))
    length, noise = draw(st.integers(1, 200)), draw(st.binary(min_size=1, max_size=20))

    def apply(content: bytes) -> bytes:
        at = int(place * len(content))
        middle = content[at : at + length]
        middle = {"cut": b"", "double": 2 * middle, "insert": noise + middle}.get(kind, middle)
        if kind == "flip":
            middle = bytes(byte ^ noise[n % len(noise)] for n, byte in enumerate(middle))
        return content[:at] if kind == "end" else content[:at] + middle + content[at + length :]

    return apply


@pytest.fixture(scope="module")
def base(finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fuzz") / "run"
    shutil.copytree(finished("fedasmu").directory, place)
    return place


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "events.jsonl", "metrics.jsonl", "world.json"])
@given(damage())
@fuzz
def test_damaged_files_of_a_run(base: Path, name: str, hurt: Callable[[bytes], bytes]) -> None:
    content = (base / name).read_bytes()
    (base / name).write_bytes(hurt(content))
    try:
        bears(lambda: audit(RunDirectory(base)))
        bears(lambda: read(base))
        bears(lambda: read_world(base))
        bears(lambda: resolve(RunDirectory(base).trusted_config(None)))
    finally:
        (base / name).write_bytes(content)


@given(st.data())
@fuzz
def test_events_with_other_values(base: Path, data: st.DataObject) -> None:
    content = (base / "events.jsonl").read_bytes()
    lines = content.splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    event = json.loads(lines[number])
    event[data.draw(st.sampled_from(sorted(event)))] = data.draw(anything)
    lines[number] = json.dumps(event).encode()
    (base / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    try:
        bears(lambda: audit(RunDirectory(base)))
        bears(lambda: report([base], base / "page.html"))
    finally:
        (base / "events.jsonl").write_bytes(content)


@given(anything)
@fuzz
def test_any_world(base: Path, value: Any) -> None:
    content = (base / "world.json").read_bytes()
    known = json.loads(content)
    key = sorted(known)[len(str(value)) % len(known)]
    (base / "world.json").write_text(json.dumps(known | {key: value}))
    try:
        bears(lambda: read_world(base))
    finally:
        (base / "world.json").write_bytes(content)


@given(st.text(max_size=60), st.sampled_from(["run", "fleet", "data", "training", "model", "method"]), anything)
@fuzz
def test_any_settings(tmp_path: Path, text: str, section: str, value: Any) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    bears(lambda: resolve(load_tables(file)))
    tables: dict[str, Any] = {}
    bears(lambda: override(tables, [text, f"{section}.{text}"]))
    bears(lambda: resolve({section: value}))
    bears(lambda: resolve({section: {"name": value, "until": value, "devices": value}}))


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{" * 100_000])
def test_an_override_may_be_nested_or_long(text: str) -> None:
    bears(lambda: override({}, [f"run.until={text}"]))


@given(damage(), st.binary(max_size=60))
@fuzz
def test_any_trace(tmp_path: Path, hurt: Callable[[bytes], bytes], noise: bytes) -> None:
    good = b"device,from,seconds_per_sample,up_mbps,down_mbps,available,cycle\na,0,0.01,10,50,1,\nb,0,0.02,,,1,100\n"
    for name, content in (("t.csv", hurt(good)), ("t.csv", noise), ("t.json", noise), ("t.json", b"[" * 9999)):
        (tmp_path / name).write_bytes(content)
        bears(lambda name=name: read_trace(tmp_path / name))


@given(damage(), st.sampled_from(["state.json", "arrays.safetensors", "checksums.json"]))
@fuzz
def test_a_damaged_checkpoint_is_not_used(tmp_path: Path, hurt: Callable[[bytes], bytes], name: str) -> None:
    import numpy as np

    shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
    for log in ("events", "metrics"):
        (tmp_path / f"{log}.jsonl").touch()
    folder = checkpoint.write(tmp_path, {"log": {"seq": 0, "events": 0, "metrics": 0}, "x": np.arange(30.0)})
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(hurt(content))
    try:
        found = checkpoint.read(tmp_path)
    except FreshetError as error:
        assert "no checkpoint to resume from" in str(error)
    else:
        assert found.tree["x"].tolist() == list(range(30))
