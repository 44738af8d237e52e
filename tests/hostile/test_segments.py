"""Compressed segments from strangers: one sentence, at once, in little memory, whatever they contain."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from freshet import RunError
from freshet.cli.util import reading_bar
from freshet.errors import FreshetError
from freshet.report import live
from freshet.report.reading import read
from freshet.runs import checkpoint, segments
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.segments import LIVE

from ..cli.conftest import command  # noqa: F401
from ..conftest import exploring, small
from ..runs.test_segments import split
from .test_fuzz import bears, damage, fuzz

zstandard = pytest.importorskip("zstandard")

FIRST, SECOND = "events-000001.jsonl.zst", "events-000002.jsonl.zst"
EVENT = b'{"seq":1,"time":0.0,"kind":"note","about":"x"}\n'


@pytest.fixture(scope="module")
def base(finished: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("segments") / "run"
    shutil.copytree(finished("fedasmu").directory, place)
    split(place, 0.4, 0.6)
    return place


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "run")
    return tmp_path / "run"


def pack(content: bytes, size: int | None = None, **settings: Any) -> bytes:
    """A frame; with another ``size``, one whose head lies about it."""
    settings = {"write_checksum": True, "write_content_size": True} | settings
    frame = bytearray(zstandard.ZstdCompressor(**settings).compress(content))
    if size is not None:
        assert frame[4] & 0xE0 == 0xA0, "four bytes of size, at once after the descriptor"
        frame[5:9] = size.to_bytes(4, "little")
    return bytes(frame)


def window(content: bytes) -> bytes:
    """A frame that asks for 128 MB to be decompressed."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, write_content_size=True)
    target = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(
        target, size=len(content), closefd=False
    ) as packed:
        packed.write(content)
    return target.getvalue()


MANY = EVENT * 3000
#: What is done to the second of two segments, and words of the sentence.
BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda old: b"", "is damaged"),
    "nonsense": (lambda old: b"nonsense" * 100, "is damaged"),
    "cut off": (lambda old: old[: len(old) // 2], "holds less than it says"),
    "cut off in its head": (lambda old: old[:5], "is damaged"),
    "a flipped bit": (lambda old: old[:-200] + bytes([old[-200] ^ 8]) + old[-199:], "is damaged"),
    "more behind it": (lambda old: old + b"more", "is damaged"),
    "a second frame": (lambda old: old + pack(EVENT), "holds more than it says"),
    "does not say how much": (lambda old: pack(EVENT, write_content_size=False), "does not say how much it holds"),
    "says too little": (lambda old: pack(MANY, len(MANY) - 5), "is damaged"),
    "says too much": (lambda old: pack(MANY, len(MANY) + 5), "is damaged"),
    "no log": (lambda old: pack(b"hello\n" * 100), "does not begin with an event"),
    "nothing in it": (lambda old: pack(b""), "does not begin with an event"),
    "its last line has no end": (lambda old: pack(b'{"seq":2}\n{"seq":3'), "a line without an end"),
    "a bomb": (lambda old: pack(EVENT * 2_000_000), "more than 1,000 times its size; it is refused"),
    "a hungry one": (lambda old: window(os.urandom(1 << 18) * 700), "is damaged"),
}


def refused(place: Path, words: str) -> None:
    """Every reader says so in one sentence; a report shows what came before."""
    with pytest.raises(RunError, match=words) as caught:
        list(RunDirectory(place).events())
    bears(lambda: audit(RunDirectory(place)))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    found = read(place)
    assert any(words in note and "what follows is not shown" in note for note in found.notes), found.notes
    assert len(list(found.events)) == len(found.events)
    with reading_bar([place]):
        pass


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", BYTES)
def test_an_invalid_segment_is_one_sentence(place: Path, kind: str) -> None:
    change, words = BYTES[kind]
    (place / SECOND).write_bytes(change((place / SECOND).read_bytes()))
    refused(place, words)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("make", [fifo, device, nowhere, Path.mkdir])
def test_only_regular_files_are_read(place: Path, make: Callable[[Path], None]) -> None:
    (place / FIRST).unlink()
    make(place / FIRST)
    words = "No such file" if make is nowhere else "it is not a regular file"
    refused(place, words)
    with pytest.raises(RunError, match=words):
        checkpoint.read(place)


def test_a_missing_segment_is_named(place: Path) -> None:
    (place / FIRST).unlink()
    refused(place, f"{FIRST} is missing")
    with pytest.raises(RunError, match=f"{FIRST} is missing"):
        checkpoint.read(place)


def test_a_missing_last_segment_is_noticed(place: Path) -> None:
    (place / SECOND).unlink()
    assert audit(RunDirectory(place)).problem
    with pytest.raises(RunError, match=r"no checkpoint to resume from \(checkpoint .* is damaged"):
        checkpoint.read(place)


def test_segments_in_the_wrong_order_are_noticed(place: Path) -> None:
    for old, new in ((FIRST, "x"), (SECOND, FIRST), ("x", SECOND)):
        (place / old).rename(place / new)
    assert "line 1 " in str(audit(RunDirectory(place)).problem)


def test_a_segment_is_removed_only_if_the_live_file_holds_the_same_lines(place: Path) -> None:
    content = b"".join(segments.lines(place / LIVE))
    (place / SECOND).unlink()
    (place / LIVE).write_bytes(content)
    segments.repair(place / LIVE)
    assert not (place / FIRST).exists() and (place / LIVE).read_bytes() == content
    split(place, 0.5)
    (place / LIVE).write_bytes(content.replace(b"trigger", b"triggex"))
    with pytest.raises(RunError, match=r"hold different events with the same numbers"):
        segments.repair(place / LIVE)
    assert (place / FIRST).exists()


@pytest.mark.timeout(300)
def test_a_line_that_is_too_long_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LONGEST_LINE", 1 << 16)
    (place / SECOND).write_bytes(pack(EVENT[:-3] + b"x" * (1 << 17) + b'"}\n'))
    refused(place, "a line without an end")


@pytest.mark.timeout(300)
def test_a_bomb_takes_little_memory(place: Path) -> None:
    (place / SECOND).write_bytes(pack(EVENT[:-3] + os.urandom(300_000).hex().encode() + b"x" * (1 << 28)))
    program = (
        "import resource, sys; from freshet.errors import RunError; from freshet.runs.reader import RunDirectory\n"
        "from freshet.runs import segments; segments.LONGEST_LINE = 1 << 24\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: list(RunDirectory(sys.argv[1]).events())\n"
        "except RunError as error: assert 'without an end' in str(error), error\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True, check=True)
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 64 * 2**20


LINES = [
    ["show", "RUN"],
    ["audit", "RUN"],
    ["report", "RUN", "-o", "page.html"],
    ["export", "RUN", "--csv", "table.csv"],
    ["pretrain", "RUN", "-o", "meta.safetensors"],
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_no_command_shows_a_traceback(command: Any, place: Path, line: list[str]) -> None:  # noqa: F811
    (place / SECOND).write_bytes(b"nonsense" * 100)
    (place / "summary.json").unlink()
    done = command(*(place if part == "RUN" else part for part in line))
    assert done.code in (0, 2) and "Traceback" not in done.out + done.err
    if done.code:
        assert len(done.err.strip().splitlines()) == 1 and SECOND in done.err


def test_a_run_with_a_damaged_segment_is_not_resumed_and_not_changed(place: Path) -> None:
    (place / SECOND).write_bytes(b"nonsense" * 100)
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    with pytest.raises(RunError, match=f"{SECOND} is damaged"):
        small(exploring("fedasmu")).resume(place, until=80)
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


def test_watch_shows_the_lines_before_the_damage(place: Path) -> None:
    (place / SECOND).write_bytes(b"nonsense" * 100)
    with live.WatchServer(place) as server:
        assert b"what follows is not shown" in (server.run.answer("") or b"")


@given(damage())
@fuzz
def test_random_damage_is_a_result_or_one_sentence(base: Path, hurt: Callable[[bytes], bytes]) -> None:
    content = (base / FIRST).read_bytes()
    (base / FIRST).write_bytes(hurt(content))
    try:
        bears(lambda: audit(RunDirectory(base)))
        bears(lambda: read(base))
        bears(lambda: checkpoint.read(base))
        try:
            segments.repair(base / LIVE)
        except FreshetError as error:
            assert str(error)
    finally:
        (base / FIRST).write_bytes(content)


LONG = b'{"seq":1,"time":0.0,"kind":"note","about":"x","a":[' + b"1.5," * 10_000_000 + b"1]}\n"


def test_a_line_that_needs_much_memory_is_refused_unparsed(tmp_path: Path) -> None:
    """6 kB on the disk, 40 MB as a line, and most of a gigabyte as objects."""
    (tmp_path / LIVE).write_bytes(EVENT.replace(b'"seq":1', b'"seq":2'))
    (tmp_path / FIRST).write_bytes(pack(LONG, level=3))
    assert (tmp_path / FIRST).stat().st_size < 10_000
    with pytest.raises(RunError, match="a line without an end"):
        list(segments.lines(tmp_path / LIVE))


def test_a_line_that_readers_reject_is_not_compressed(tmp_path: Path) -> None:
    (tmp_path / LIVE).write_bytes(LONG)
    assert not segments.rotate(tmp_path / LIVE, len(LONG))
    assert [path.name for path in tmp_path.iterdir()] == [LIVE] and (tmp_path / LIVE).stat().st_size == len(LONG)
