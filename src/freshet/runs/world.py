"""``world.json``: fleet and data of a run, so that a later reader does not have to rebuild them.

It is written once: at the start of a simulation, and at the end of a run on real devices, which measures them. Nothing
in it is trusted: every value is checked when it is read.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from freshet.core.about import Curve
from freshet.errors import ConfigError, RunError
from freshet.files import read_regular, write_atomically
from freshet.runs.records import integer, json_safe, number

WORLD = "world.json"
T = TypeVar("T")


@dataclass(frozen=True)
class RunWorld:
    """Fleet and data of one run. Lists of the fleet have one entry per device."""

    #: Name of the data set, its classes, and how many samples of it were used.
    data: str
    classes: list[str]
    train_samples: int
    test_samples: int
    #: Bytes of one model on the wire, as float32.
    model_bytes: int
    #: Seconds of one local training, and bytes per second (infinite for an unlimited link; null in the file).
    train_seconds: list[float]
    up_rate: list[float]
    down_rate: list[float]
    #: Samples, in total and per class.
    samples: list[int]
    label_counts: list[list[int]]
    #: Equal for all devices: seconds before the first byte, mean seconds online and offline, share of lost uploads.
    up_latency: float
    down_latency: float
    on_seconds: float
    off_seconds: float
    loss: float
    #: Settings (``section.key``) that do not affect the results.
    aside: list[str]
    #: Numbers of the events that a report draws over time, chosen by the method.
    curves: list[Curve]
    #: What the run is judged by, and whether "max" or "min" is better.
    metric: str = "accuracy"
    direction: str = "max"
    #: For uint8 images, per channel, in units of 0..1: the network sees ``(x / 255 - mean) / std``.
    mean: list[float] | None = None
    std: list[float] | None = None
    #: Shape of one sample as the network sees it.
    sample_shape: list[int] | None = None
    #: Outputs of the network per sample (or token), if the data tell: one per class.
    outputs: int | None = None
    #: For texts: the number of token ids, and the id that pads.
    vocabulary: int | None = None
    pad_id: int | None = None
    #: Seconds between a model's arrival and the first step, to start a process and load data (empty: none).
    start_seconds: list[float] = field(default_factory=list)
    #: Short hashes of data, shards, model and fleet. A run is only resumed if they are the same.
    fingerprint: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.train_seconds)

    def up(self, device: int, size: int) -> float:
        """Seconds until ``size`` bytes from the device have reached the server."""
        return self.up_latency + size / self.up_rate[device]

    def down(self, device: int, size: int) -> float:
        """Seconds until ``size`` bytes from the server have reached the device."""
        return self.down_latency + size / self.down_rate[device]

    def seconds_to_first_step(self, device: int) -> float:
        """Seconds between a trigger and the first step of training."""
        return self.down(device, self.model_bytes) + (self.start_seconds[device] if self.start_seconds else 0.0)


def write_world(directory: Path, world: RunWorld) -> None:
    """Write ``world.json`` atomically."""
    try:
        write_atomically(directory / WORLD, (json.dumps(json_safe(asdict(world)), allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError("run.out", f"{directory / WORLD} cannot be written ({error.strerror})") from None


def read_world(directory: Path) -> RunWorld | None:
    """The world of a run, or None if it has no world.json (version 0.1 wrote none); raises if the file is not valid."""
    path = directory / WORLD
    if not path.is_file():
        return None
    try:
        found = json.loads(read_regular(path, 1 << 30))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be used: {str(error) or type(error).__name__}") from None
    return parse_world(found, path)


def parse_world(found: Any, path: Path) -> RunWorld:
    """The world from the content of ``world.json``; raises an error that names the file if a value is not valid."""
    try:
        if not isinstance(found, dict):
            raise ValueError("it does not hold a JSON object")
        return _validate(found)
    except KeyError as error:
        problem = f"{error.args[0]} is missing"
    except (ValueError, RecursionError) as error:
        problem = str(error) or type(error).__name__
    raise RunError(f"{path} cannot be used: {problem}")


# ---- checks


def _validate(found: dict[str, Any]) -> RunWorld:
    """The values with their types; raises ``KeyError`` or ``ValueError`` for one that is missing or not valid."""
    devices = len(found["train_seconds"]) if isinstance(found["train_seconds"], list) else 0
    if not devices:
        _refuse("train_seconds", "a list with one number per device")
    classes = _list(found, "classes", _text)
    rows = _list(found, "label_counts", lambda row, key: _items(row, key, _count, len(classes)), devices)
    samples = _list(found, "samples", _count, devices)
    if classes and samples != [sum(row) for row in rows]:
        _refuse("samples", "the sum of label_counts for each device")
    return RunWorld(
        data=_text(found["data"], "data"),
        classes=classes,
        train_samples=_count(found["train_samples"], "train_samples"),
        test_samples=_count(found["test_samples"], "test_samples"),
        model_bytes=_count(found["model_bytes"], "model_bytes"),
        train_seconds=_list(found, "train_seconds", _amount, devices),
        up_rate=_list(found, "up_rate", _rate, devices),
        down_rate=_list(found, "down_rate", _rate, devices),
        samples=samples,
        label_counts=rows,
        up_latency=_amount(found["up_latency"], "up_latency"),
        down_latency=_amount(found["down_latency"], "down_latency"),
        on_seconds=_amount(found["on_seconds"], "on_seconds"),
        off_seconds=_amount(found["off_seconds"], "off_seconds"),
        loss=_share(found["loss"], "loss"),
        aside=_list(found, "aside", _text),
        curves=_list(found, "curves", _curve),
        metric=_text(found.get("metric", "accuracy"), "metric"),
        direction="min" if found.get("direction") == "min" else "max",
        mean=_statistics(found, "mean"),
        std=_statistics(found, "std"),
        sample_shape=None if found.get("sample_shape") is None else _list(found, "sample_shape", _count),
        outputs=_optional(found, "outputs"),
        vocabulary=_optional(found, "vocabulary"),
        pad_id=_optional(found, "pad_id"),
        start_seconds=_list(found, "start_seconds", _amount, devices) if found.get("start_seconds") else [],
        fingerprint=_hashes(found.get("fingerprint", {}), "fingerprint"),
    )


def _curve(value: Any, key: str) -> Curve:
    if not isinstance(value, list) or len(value) != len(Curve._fields):
        _refuse(key, f"a list of {', '.join(Curve._fields)}")
    return Curve(*(_text(each, key) for each in value))


def _statistics(found: dict[str, Any], key: str) -> list[float] | None:
    return None if found.get(key) is None else _list(found, key, _amount)


def _optional(found: dict[str, Any], key: str) -> int | None:
    return None if found.get(key) is None else _count(found[key], key)


def _hashes(value: Any, key: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse(key, "an object with one text for each part")
    return {name: _text(each, key) for name, each in value.items()}


def _refuse(key: str, wanted: str) -> NoReturn:
    raise ValueError(f"{key} must be {wanted}")


def _list(found: dict[str, Any], key: str, check: Callable[[Any, str], T], length: int | None = None) -> list[T]:
    return _items(found[key], key, check, length)


def _items(value: Any, key: str, check: Callable[[Any, str], T], length: int | None) -> list[T]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        _refuse(key, "a list" if length is None else f"a list of {length}")
    return [check(each, key) for each in value]


def _text(value: Any, key: str) -> str:
    return value if isinstance(value, str) else _refuse(key, "text")


def _count(value: Any, key: str) -> int:
    found = integer(value)
    return found if found is not None and found >= 0 else _refuse(key, "a whole number, not negative")


def _amount(value: Any, key: str) -> float:
    found = number(value)
    return found if found is not None and found >= 0 else _refuse(key, "a finite number, not negative")


def _rate(value: Any, key: str) -> float:
    found = math.inf if value is None else number(value)
    return found if found is not None and found > 0 else _refuse(key, "a positive number, or null for no limit")


def _share(value: Any, key: str) -> float:
    found = number(value)
    return found if found is not None and 0 <= found <= 1 else _refuse(key, "a number from 0 to 1")
