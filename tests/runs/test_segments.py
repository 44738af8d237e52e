"""A log in compressed segments is the same log: for every reader, and after a kill at any moment."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from freshet import Federation, Observer
from freshet.cli.util import reading_bar
from freshet.errors import ConfigError, RunError
from freshet.report.export import tidy
from freshet.report.reading import Log, read, read_all
from freshet.runs import checkpoint, segments
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.segments import LIVE, lines
from freshet.runs.writer import RunWriter
from tests.conftest import exploring
from tests.runs.test_lifecycle import Stage

pytest.importorskip("zstandard")

#: Bytes and seconds: a segment every few ticks.
OFTEN = {"rotate_bytes": 120, "checkpoint_every": 1.0}
State = dict[str, bytes]


def whole(directory: Path) -> bytes:
    return b"".join(lines(directory / LIVE))


def test_lines_do_not_depend_on_the_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"".join(b'{"seq": %d, "text": "%s\r\\n"}\n' % (number, b"x" * number) for number in range(1, 60))
    (tmp_path / LIVE).write_bytes(content + b'{"seq": 60')
    expected = (content + b'{"seq": 60').split(b"\n")
    for portion in (1, 7, 64, 1000, len(content), 2 * len(content)):
        monkeypatch.setattr(segments, "_PORTION", portion)
        assert [line.rstrip(b"\n") for line in lines(tmp_path / LIVE)] == expected
        assert [line.rstrip(b"\n") for line in lines(tmp_path / LIVE, len(expected[0]) + 1)] == expected[1:]


def test_no_line_is_longer_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LONGEST_LINE", 200)
    monkeypatch.setattr(segments, "_PORTION", 64)
    (tmp_path / LIVE).write_bytes(b"x" * 10_000 + b"\n")
    assert max(map(len, lines(tmp_path / LIVE))) <= 200


def packed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.zst"))


def split(directory: Path, *shares: float) -> None:
    """Rotate these shares of what is left of the log, one after the other."""
    for share in shares:
        content = (directory / LIVE).read_bytes()
        assert segments.rotate(directory / LIVE, content.rindex(b"\n", 0, int(share * len(content))) + 1)


# ---- killed at any moment


def state_of(directory: Path) -> State:
    """What would be left if the machine stopped now."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def lay_out(directory: Path, state: State) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for name, content in state.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


@pytest.fixture
def moments(tmp_path: Path) -> Iterator[Callable[..., list[State]]]:
    """Runs something and returns every state its directory was in, looked at before each line of what writes there."""
    before = sys.gettrace()
    runs = Path(segments.__file__).parent
    writers = {str(runs / f"{name}.py") for name in ("segments", "writer", "checkpoint")} | {
        str(runs.parent / "files.py")
    }

    def watched(directory: Path, work: Callable[[], Any]) -> list[State]:
        seen: dict[int, State] = {}

        def look(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename not in writers:
                return None
            if event in ("line", "return"):
                state = state_of(directory)
                seen.setdefault(hash(tuple(sorted(state.items()))), state)
            return look

        sys.settrace(look)
        try:
            work()
        finally:
            sys.settrace(before)
        return list(seen.values())

    yield watched
    sys.settrace(before)


@pytest.fixture
def reference(tmp_path: Path) -> bytes:
    place = tmp_path / "reference"
    Stage(place).live(keep=True, checkpoint_every=1.0)
    return (place / LIVE).read_bytes()


def spoil_newest(directory: Path) -> None:
    (
        directory / "checkpoint" / max(path.name for path in (directory / "checkpoint").glob("0*")) / "state.json"
    ).unlink()


@pytest.mark.parametrize("fall_back", [False, True], ids=["newest checkpoint", "newest checkpoint damaged"])
def test_a_kill_at_any_moment_leaves_a_directory_that_resumes_to_the_same_log(
    tmp_path: Path,
    reference: bytes,
    moments: Callable[..., list[State]],
    fall_back: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # nobody pulls the plug
    stage = Stage(tmp_path / "run")
    states = moments(stage.directory, lambda: stage.live(keep=True, **OFTEN))
    assert len(packed(stage.directory)) >= 3 and whole(stage.directory) == reference
    double = half = resumed = 0
    for state in states:
        again = Stage(tmp_path / "again")
        lay_out(again.directory, state)
        if LIVE not in state:
            continue
        assert reference.startswith(whole(again.directory)), "a reader sees no line twice and misses none"
        saved = [name for name in state if name.endswith("checksums.json") and ".writing" not in name]
        if len(saved) <= fall_back or (fall_back and "summary.json" in state):
            continue
        if fall_back:
            spoil_newest(again.directory)
        double += len(packed(again.directory)) and segments.live_start(again.directory / LIVE) < sum(
            segments._segment(path).size for path in again.directory.glob("*.zst")
        )
        half += any(name.startswith(".events") for name in state)
        again.live(resume=True, keep=True, rotate_bytes=120, checkpoint_every=4.0)
        assert whole(again.directory) == reference
        assert len(packed(again.directory)) >= 1 and not list(again.directory.glob(".events*"))
        resumed += 1
    assert double >= 3 and half >= 6 and resumed > 60, "the moments between the steps were among them"


def test_a_failed_rotation_ends_the_run_with_one_sentence_and_is_repeated(
    tmp_path: Path, reference: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("_pack", "_drop_start"):
        stage = Stage(tmp_path / step)
        with monkeypatch.context() as patch:
            patch.setattr(segments, step, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(RunError, match=r"No space left on device.*freshet resume"):
                stage.live(keep=True, **OFTEN)
        assert reference.startswith(whole(stage.directory))
        stage.live(resume=True, keep=True, **OFTEN)
        assert whole(stage.directory) == reference


@pytest.mark.parametrize("step", ["_pack", "_drop_start"])
@pytest.mark.parametrize("keep", [True, False])
def test_a_full_disk_at_the_last_rotation_does_not_fail_a_finished_run(
    tmp_path: Path, reference: bytes, monkeypatch: pytest.MonkeyPatch, step: str, keep: bool
) -> None:
    stage = Stage(tmp_path / "run")
    write = RunWriter.close

    def full(*given: Any, **named: Any) -> None:
        monkeypatch.setattr(segments, step, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        write(*given, **named)

    monkeypatch.setattr(RunWriter, "close", full)
    stage.live(keep=keep, rotate_bytes=120, checkpoint_every=20.0)
    assert stage.summary()["status"] == "finished"
    assert "the end of the log stays uncompressed (No space left on device)" in stage.said
    assert (stage.directory / LIVE).read_bytes() == reference and packed(stage.directory) == []
    assert ("checkpoint" in stage.files()) == keep and ".lock" not in stage.files()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("every", [0.0, 1.0, 20.0])
def test_the_end_compresses_all_lines_before_the_kept_checkpoint(
    tmp_path: Path, reference: bytes, keep: bool, every: float
) -> None:
    stage = Stage(tmp_path / "run")
    stage.live(keep=keep, checkpoint_every=every, rotate_bytes=120)
    assert whole(stage.directory) == reference
    assert packed(stage.directory)[:1] == ["events-000001.jsonl.zst"]
    rest = len((stage.directory / LIVE).read_bytes())
    if keep or not every:
        assert rest == 0, "nothing was written after the last checkpoint"
    assert rest <= 120
    if keep and every:
        found = checkpoint.read(stage.directory)
        assert found.tree["log"]["events"] == len(reference) and found.problems == []


def test_short_logs_stay_uncompressed_and_an_interrupted_run_keeps_two_checkpoints(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run")
    stage.live(keep=True, rotate_bytes=10_000, checkpoint_every=1.0)
    assert packed(stage.directory) == []

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    stage = Stage(tmp_path / "failed")
    with pytest.raises(ZeroDivisionError):
        stage.live({9: fail}, keep=True, **OFTEN)
    assert len(list((stage.directory / "checkpoint").iterdir())) == 2
    spoil_newest(stage.directory)
    assert checkpoint.read(stage.directory).tree["ticks"] == 7


def test_lines_that_compress_too_well_stay_uncompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "UNCHECKED_BYTES", 1000)
    content = b'{"seq":1,"note":"' + bytes(1_000_000).replace(b"\0", b"x") + b'"}\n'
    (tmp_path / LIVE).write_bytes(content)
    assert not segments.rotate(tmp_path / LIVE, len(content))
    assert [path.name for path in tmp_path.iterdir()] == [LIVE] and (tmp_path / LIVE).read_bytes() == content


# ---- a simulation


class CrashError(Exception):
    pass


class Crash(Observer):
    def on_progress(self, time: float) -> None:
        if time >= 35.0:
            raise CrashError


def test_a_simulation_crashes_is_resumed_and_is_extended(
    federate: Callable[..., Federation], finished: Callable[[str], Any], tmp_path: Path
) -> None:
    rotated = federate(exploring("fedasmu"), run={"checkpoint_every": 4.0, "rotate_log": 0.002})
    with pytest.raises(CrashError):
        rotated.run(45, out=tmp_path / "run", observers=[Crash()])
    assert packed(tmp_path / "run")
    rotated.resume(tmp_path / "run")
    result = rotated.resume(tmp_path / "run", until=60)
    plain = finished("fedasmu")
    assert whole(result.directory) == (plain.directory / LIVE).read_bytes()
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert audit(RunDirectory(result.directory)).passed


# ---- readers


@pytest.fixture
def pair(finished: Callable[[str], Any], tmp_path: Path) -> tuple[Path, Path]:
    """A run in one piece, and the same in four."""
    for name in ("plain", "pieces"):
        shutil.copytree(finished("fedasmu").directory, tmp_path / name)
    split(tmp_path / "pieces", 0.3, 0.5, 0.5)
    return tmp_path / "plain", tmp_path / "pieces"


def test_all_readers_read_the_same(pair: tuple[Path, Path]) -> None:
    plain, pieces = pair
    assert len(packed(pieces)) == 3
    assert list(RunDirectory(plain).events()) == list(RunDirectory(pieces).events())
    found, counted = audit(RunDirectory(pieces)), 0
    assert found.passed and found == audit(RunDirectory(plain))
    one, other = read(plain), read(pieces)
    assert list(one.events) == list(other.events) and one.events.kinds == other.events.kinds and other.notes == []
    assert list(one.events.of("merge")) == list(other.events.of("merge"))
    rows = [[{**row, "run": ""} for row in tidy(read_all([place]))] for place in pair]
    assert rows[0] == rows[1]
    for place in pair:
        counted = 0

        def seen(count: int) -> None:
            nonlocal counted
            counted += count

        read(place, seen)
        assert counted == segments.size(place / LIVE) == (plain / LIVE).stat().st_size


def test_the_progress_bar_knows_the_uncompressed_size(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[float] = []
    monkeypatch.setattr("freshet.cli.util.Progress.add_task", lambda self, text, total: totals.append(total) or 0)
    for place in pair:
        with reading_bar([place], passes=2):
            pass
    assert totals == [2 * (pair[0] / LIVE).stat().st_size] * 2


def test_an_audit_counts_lines_through_all_pieces(pair: tuple[Path, Path]) -> None:
    _, pieces = pair
    behind = sum(1 for _ in RunDirectory(pieces).events()) - (pieces / LIVE).read_bytes().count(b"\n")
    rows = [json.loads(line) for line in (pieces / LIVE).read_text().splitlines()]
    rows[2]["time"] = -1.0
    (pieces / LIVE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"events.jsonl, line {behind + 3} (" in str(audit(RunDirectory(pieces)).problem)


def test_a_log_that_is_rotated_while_it_is_read_is_read_completely(pair: tuple[Path, Path]) -> None:
    plain, pieces = pair
    shutil.copyfile(plain / LIVE, pieces / LIVE)
    for path in pieces.glob("*.zst"):
        path.unlink()
    going = lines(pieces / LIVE)
    first = next(going)
    split(pieces, 0.5, 0.5)
    assert first + b"".join(going) == (plain / LIVE).read_bytes()


def test_following_a_log_continues_over_a_rotation(pair: tuple[Path, Path], tmp_path: Path) -> None:
    content = (pair[0] / LIVE).read_bytes()
    cuts = [content.index(b"\n", int(share * len(content))) + 1 for share in (0.2, 0.5, 0.8)]
    (tmp_path / "config.toml").touch()
    live, log = tmp_path / LIVE, Log(RunDirectory(tmp_path))
    live.write_bytes(content[: cuts[0]])
    assert log.read() and log.unread == 0
    live.write_bytes(content[: cuts[1]])
    segments.rotate(live, cuts[1])  # more than the reader knows: it goes on in the midst of the segment
    assert live.stat().st_size == 0 and log.read() and log.unread == 0
    with live.open("ab") as file:
        file.write(content[cuts[1] : cuts[2]] + b'{"seq": ')
    assert log.read() and not log.read() and log.unread == 8
    expected = [json.loads(line) for line in content[: cuts[2]].splitlines()]
    assert list(log) == expected and len(log) == len(expected)
    live.write_bytes(b"")
    assert log.read() and list(log) == [json.loads(line) for line in content[: cuts[1]].splitlines()]


def test_a_reader_holds_no_more_than_a_portion_of_a_segment(tmp_path: Path) -> None:
    import tracemalloc

    with (tmp_path / LIVE).open("wb") as file:
        for seq in range(1, 200_001):
            file.write(b'{"seq":%d,"time":%f,"kind":"upload","note":"%s"}\n' % (seq, seq / 7, b"x" * 60))
        length = file.tell()
    assert segments.rotate(tmp_path / LIVE, length) and length > 15_000_000
    tracemalloc.start()
    try:
        assert sum(map(len, lines(tmp_path / LIVE))) == length
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


# ---- the library


def test_an_error_names_the_remedy_if_zstandard_is_missing(
    pair: tuple[Path, Path], federate: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segments, "find_spec", lambda name: None)
    segments._inspect.cache_clear()
    with pytest.raises(ConfigError, match=r"run\.rotate_log: needs zstandard.*pip install 'freshet-fl\[zst\]'"):
        federate("fedavg", run={"rotate_log": 1.0}).run(10, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert federate("fedavg").run(10, out=tmp_path / "new").summary["status"] == "finished"
    for reader in (lambda: audit(RunDirectory(pair[1])), lambda: read(pair[1]), lambda: checkpoint.read(pair[1])):
        with pytest.raises(RunError, match=r"events-000001\.jsonl\.zst needs zstandard.*pip install"):
            reader()
    assert audit(RunDirectory(pair[0])).passed
