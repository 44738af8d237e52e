"""The fleet: training speed, links, availability and upload loss of each device."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from freshet.core.method import Options
from freshet.core.streams import stream
from freshet.errors import ConfigError
from freshet.runs.world import read_world
from freshet.sim.traces import Trace, read_trace

Floats = NDArray[np.float64]
#: Bytes per second in one Mbit/s.
MBPS = 1e6 / 8


class FleetOptions(Options):
    """A random fleet that contains both ends of the speed range."""

    devices: int = Field(40, ge=1, description="number of devices (the paper's m)")
    fastest: float = Field(10.0, gt=0, description="seconds of one local training on the fastest device")
    ratio: float = Field(5.0, ge=1, description="slowest training time over the fastest, for the same work")
    time: Literal["work", "trip"] = Field(
        "work",
        description="training that takes the device's seconds: work (5 epochs of an average shard; time is "
        "proportional to steps x batch) or trip (any whole local training, as in the paper)",
    )
    up_mbps: float = Field(10.0, ge=0, description="uplink of a device in Mbit/s (0: bytes take no time)")
    down_mbps: float = Field(50.0, ge=0, description="downlink of a device in Mbit/s (0: bytes take no time)")
    link_ratio: float = Field(1.0, ge=1, description="best link over worst link (1: all equal)")
    up_latency: float = Field(0.05, ge=0, description="seconds before the first byte goes up")
    down_latency: float = Field(0.05, ge=0, description="seconds before the first byte comes down")
    on_seconds: float = Field(0.0, ge=0, description="mean seconds that a device stays reachable (0: always)")
    off_seconds: float = Field(0.0, ge=0, description="mean seconds that a device stays away")
    loss: float = Field(0.0, ge=0, lt=1, description="probability that an upload is lost")
    trace: str = Field(
        "",
        description="file (.csv, .json) with the devices' speeds, rates and absences; it overrides the settings above",
    )
    measured: str = Field(
        "",
        description="run directory of a deployment: its devices at measured speeds; it overrides the settings above",
    )
    custom: bool = Field(False, description="a Fleet was given from Python; the settings above do not apply")

    @model_validator(mode="before")
    @classmethod
    def _both_or_none(cls, values: Any) -> Any:
        if isinstance(values, dict) and (values.get("on_seconds", 0) == 0) != (values.get("off_seconds", 0) == 0):
            raise ValueError("on_seconds and off_seconds must both be 0 (always reachable) or both be positive")
        return values


@dataclass
class Fleet:
    """Per-device figures: seconds per local training, bytes per second up and down (one number: the same for all)."""

    train_seconds: Floats
    up_rate: Floats
    down_rate: Floats
    up_latency: float = 0.0
    down_latency: float = 0.0
    on_seconds: float = 0.0
    off_seconds: float = 0.0
    loss: float = 0.0
    seed: int = 0
    #: Speeds, rates and absences over time. The figures above are then those of the first rows.
    trace: Trace | None = None
    #: Set if ``train_seconds`` were derived from it.
    seconds_per_sample: Floats | None = None
    #: Seconds between the arrival of a model at a device and the first step.
    start_seconds: Floats = 0.0  # type: ignore[assignment]
    _switches: dict[int, tuple[bool, list[float], np.random.Generator]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.train_seconds = _per_device("train_seconds", self.train_seconds)
        devices = len(self.train_seconds)
        self.up_rate = _per_device("up_rate", self.up_rate, devices)
        self.down_rate = _per_device("down_rate", self.down_rate, devices)
        if self.seconds_per_sample is not None:
            self.seconds_per_sample = _per_device("seconds_per_sample", self.seconds_per_sample, devices)
        self.start_seconds = _per_device("start_seconds", self.start_seconds, devices)
        for name in ("up_latency", "down_latency", "on_seconds", "off_seconds", "loss"):
            setattr(self, name, _non_negative(name, getattr(self, name)))
        if self.loss > 1:
            raise ConfigError("fleet.loss", f"must be a probability in 0..1, but {self.loss:g} was given")
        if (self.on_seconds == 0) != (self.off_seconds == 0):
            raise ConfigError("fleet.on_seconds", "and off_seconds must both be 0 (always reachable) or both positive")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError("fleet.seed", f"must be a whole number from 0, but {self.seed!r} was given")
        if self.trace is not None and len(self.trace) != devices:
            raise ConfigError("fleet.trace", f"has {len(self.trace)} devices, but there are {devices} train_seconds")

    @staticmethod
    def draw(options: FleetOptions, seed: int, work: Floats | None = None) -> "Fleet":
        """Draw training seconds uniformly between fastest and ratio x fastest, both ends included.

        A trace or a deployment overrides them. ``work`` is the number of samples of one local training of each device.
        """
        if options.measured:
            return Fleet.from_deployment(options)
        rng = stream(seed, "fleet")
        seconds = options.fastest * (1.0 + (options.ratio - 1.0) * rng.random(options.devices))
        if options.devices > 1:
            seconds[np.argmax(seconds)] = options.fastest * options.ratio
        seconds[np.argmin(seconds)] = options.fastest
        share = 1.0 / (1.0 + (options.link_ratio - 1.0) * rng.random(options.devices))
        fleet = Fleet(
            train_seconds=seconds,
            up_rate=share * (options.up_mbps or math.inf) * 1e6 / 8,
            down_rate=share * (options.down_mbps or math.inf) * 1e6 / 8,
            up_latency=options.up_latency,
            down_latency=options.down_latency,
            on_seconds=options.on_seconds,
            off_seconds=options.off_seconds,
            loss=options.loss,
            seed=seed,
        )
        return (
            fleet.with_trace(read_trace(options.trace).sample(options.devices, seed), work) if options.trace else fleet
        )

    @staticmethod
    def from_deployment(options: FleetOptions) -> "Fleet":
        """Return the devices of a deployment, with the medians of their trips."""
        world = read_world(Path(options.measured).expanduser())
        key, path = "fleet.measured", options.measured
        if world is None:
            raise ConfigError(key, f"{path} has no world.json; give the directory of a finished run")
        if len(world) != options.devices:
            raise ConfigError("fleet.devices", f"is {options.devices}, but {path} has {len(world)} devices")
        idle = next((device for device, seconds in enumerate(world.train_seconds) if seconds <= 0), None)
        if idle is not None:
            raise ConfigError(key, f"in {path} device {idle} has not completed a trip; let the deployment run longer")
        return Fleet(
            train_seconds=np.array(world.train_seconds),
            up_rate=np.array(world.up_rate),
            down_rate=np.array(world.down_rate),
            up_latency=world.up_latency,
            down_latency=world.down_latency,
            start_seconds=np.array(world.start_seconds or 0.0),
        )

    def __len__(self) -> int:
        return len(self.train_seconds)

    def with_trace(self, trace: Trace, work: Floats | None) -> "Fleet":
        """Return the fleet with the speeds, rates and absences of a trace. A rate missing in the trace stays.

        ``train_seconds_k = seconds_per_sample_k * work_k`` with the first row's figure.
        """
        if work is None:
            raise ConfigError("fleet.trace", "gives seconds per sample, but no samples are known here; leave it out")
        first = [history.rows[0] for history in trace.histories]
        per_sample = np.array([row.seconds_per_sample for row in first])
        up = [
            rate if row.up_mbps is None else row.up_mbps * MBPS for row, rate in zip(first, self.up_rate, strict=True)
        ]
        down = [
            rate if row.down_mbps is None else row.down_mbps * MBPS
            for row, rate in zip(first, self.down_rate, strict=True)
        ]
        return replace(
            self,
            train_seconds=per_sample * work,
            up_rate=np.array(up),
            down_rate=np.array(down),
            trace=trace,
            seconds_per_sample=per_sample,
            on_seconds=0.0,
            off_seconds=0.0,
            _switches={},
        )

    def scale_to_work(self, work: Floats, usual: float) -> "Fleet":
        """Scale training seconds to the work of each device: ``train_seconds_k work_k / usual``."""
        return replace(self, train_seconds=self.train_seconds * work / usual)

    def upload_seconds(self, device: int, size: int, time: float = 0.0) -> float:
        """Seconds until ``size`` bytes sent by the device at ``time`` reach the server."""
        mbps = None if self.trace is None else self.trace.histories[device].figures_at(time).up_mbps
        return self.up_latency + size / (self.up_rate.item(device) if mbps is None else mbps * MBPS)

    def download_seconds(self, device: int, size: int, time: float = 0.0) -> float:
        """Seconds until ``size`` bytes sent by the server at ``time`` reach the device."""
        mbps = None if self.trace is None else self.trace.histories[device].figures_at(time).down_mbps
        return self.down_latency + size / (self.down_rate.item(device) if mbps is None else mbps * MBPS)

    def slowdown(self, device: int, time: float) -> float:
        """Training time at ``time`` over ``train_seconds``; 1 without a trace."""
        if self.trace is None:
            return 1.0
        history = self.trace.histories[device]
        return history.figures_at(time).seconds_per_sample / history.rows[0].seconds_per_sample

    def epoch_seconds(self, device: int, epochs: int, time: float = 0.0) -> float:
        """Seconds per epoch from ``time`` on, if a whole local training has ``epochs`` epochs."""
        seconds = self.train_seconds.item(device)
        return (seconds if self.trace is None else seconds * self.slowdown(device, time)) / epochs

    def is_lost(self, device: int, trip: int) -> bool:
        """Return whether this trip's upload is lost."""
        return self.loss > 0 and bool(stream(self.seed, "loss", device, trip).random() < self.loss)

    def available(self, device: int, time: float) -> bool:
        """Return whether the device is reachable at this time."""
        if self.trace is not None:
            return self.trace.histories[device].available(time)
        if self.on_seconds == 0:
            return True
        starts_on, switches = self._switches_until(device, time)
        return starts_on == (bisect_right(switches, time) % 2 == 0)

    def leave_time(self, device: int, time: float) -> float:
        """Return when a device that is reachable at ``time`` leaves."""
        if self.trace is not None:
            return self.trace.histories[device].leave_time(time)
        if self.on_seconds == 0:
            return math.inf
        _, switches = self._switches_until(device, time)
        return switches[bisect_right(switches, time)]

    def _switches_until(self, device: int, time: float) -> tuple[bool, list[float]]:
        """Return the on/off switches of a device, drawn from its stream up to ``time``."""
        if device not in self._switches:
            rng = stream(self.seed, "availability", device)
            starts_on = bool(rng.random() < self.on_seconds / (self.on_seconds + self.off_seconds))
            self._switches[device] = (starts_on, [], rng)
        starts_on, switches, rng = self._switches[device]
        while not switches or switches[-1] <= time:
            on_now = starts_on == (len(switches) % 2 == 0)
            length = float(rng.exponential(self.on_seconds if on_now else self.off_seconds))
            switches.append((switches[-1] if switches else 0.0) + length)
        return starts_on, switches


def _per_device(name: str, given: Any, devices: int | None = None) -> Floats:
    """Check one positive number per device. Rates may be infinite. With ``devices``, one number stands for all."""
    try:
        values = np.array(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"fleet.{name}", f"must be one number per device, but {str(given)[:50]!r} was given"
        ) from None
    if values.ndim == 0 and devices is not None:
        values = np.full(devices, values)
    if values.ndim != 1 or len(values) == 0:
        raise ConfigError(f"fleet.{name}", f"must be one number per device, but its shape is {values.shape}")
    if devices is not None and len(values) != devices:
        raise ConfigError(
            f"fleet.{name}", f"has {len(values)} numbers, but train_seconds has {devices}; one per device"
        )
    in_range = values >= 0 if name == "start_seconds" else values > 0
    bad = np.flatnonzero(~((np.isfinite(values) | name.endswith("_rate")) & in_range))
    if len(bad):
        required = "positive" if name.endswith("_rate") else "positive and finite"
        raise ConfigError(f"fleet.{name}", f"must be {required}, but device {bad[0]} has {values[bad[0]]:g}")
    return values


def _non_negative(name: str, given: Any) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"fleet.{name}", f"must be a finite number from 0, but {str(given)[:50]!r} was given")
    return value
