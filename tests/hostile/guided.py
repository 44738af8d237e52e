"""Bytes from outside, made by a fuzzer that watches which branches they reach (atheris): a result or one sentence.

    python tests/hostile/guided.py TARGET [--runs 50000]

``make fuzz`` runs all targets. A finding is printed as a traceback with its input, and the process ends with another
code than 0.
"""

import argparse
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["freshet"]):
    from freshet.config import load_tables
    from freshet.data.idx import read_idx
    from freshet.data.plain_pickle import load_plain
    from freshet.errors import FreshetError
    from freshet.flower import wire
    from freshet.runs import segments
    from freshet.runs.records import parse_line
    from freshet.sim.traces import read_trace

FOLDER = Path(tempfile.mkdtemp(prefix="freshet-fuzz-"))
TRACE = b"device,seconds_per_sample,up_mbps,down_mbps\n0,0.1,10,50\n1,0.2,5,20\n"


def filed(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of files as one of bytes."""
    path = FOLDER / name

    def call(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return call


def through(path: Path) -> int:
    """All lines of a log in one compressed part and an empty rest."""
    live = path.with_name("events.jsonl")
    live.write_bytes(b"")
    return sum(len(line) for line in segments.lines(live))


def packed(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def idx(path: Path) -> object:
    return read_idx(path, 1)


#: What is read, and some content to begin with.
TARGETS: dict[str, tuple[Callable[[bytes], object], list[bytes]]] = {
    "pickle": (load_plain, [pickle.dumps({b"data": np.zeros((2, 3), np.uint8), b"labels": [1, 2]}, protocol=2)]),
    "codec": (wire.from_bytes, [wire.to_bytes({"a": 1, "w": np.ones(3, np.float32), "deep": {"x": [1.5, "t"]}})]),
    "trace-csv": (filed("trace.csv", read_trace), [TRACE]),
    "trace-json": (filed("trace.json", read_trace), [b'[{"device": 0, "seconds_per_sample": 0.1}]']),
    "toml": (filed("config.toml", load_tables), [b'[method]\nname = "fedavg"\n[training]\nlr = 0.1\n']),
    "line": (parse_line, [b'{"seq": 1, "time": 0.5, "kind": "upload", "device": 3}\n']),
    "segment": (filed("events-000001.jsonl.zst", through), [packed(b'{"seq": 1, "time": 0.0, "kind": "lost"}\n' * 9)]),
    "idx": (filed("labels-idx1-ubyte", idx), [bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 3])]),
}
ALLOWED = (FreshetError, wire.MalformedMessage)


def fuzz(name: str, runs: int) -> None:
    """Ends the process: 0 when nothing was found."""
    call, seeds = TARGETS[name]
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            call(data)
        except ALLOWED as error:
            assert str(error), "a refusal says why"

    limits = [f"-runs={runs}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={FOLDER}/"]
    atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", str(corpus)], once)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=50_000)
    arguments = parser.parse_args()
    fuzz(arguments.target, arguments.runs)


if __name__ == "__main__":
    main()
