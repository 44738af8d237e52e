"""The fleet: how fast each device trains, what its links carry, when it is there, how often an upload is lost."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from freshet.core.method import Options
from freshet.core.streams import stream

Floats = NDArray[np.float64]


class FleetOptions(Options):
    """A fleet drawn at random; both ends of the speed range are present."""

    devices: int = Field(40, ge=1, description="number of devices (the paper's m)")
    fastest: float = Field(10.0, gt=0, description="seconds that the fastest device needs for one local training")
    ratio: float = Field(5.0, ge=1, description="slowest device's training time over the fastest's")
    up_mbps: float = Field(10.0, gt=0, description="uplink of a device in Mbit/s")
    down_mbps: float = Field(50.0, gt=0, description="downlink of a device in Mbit/s")
    link_ratio: float = Field(1.0, ge=1, description="best link over worst link (1: all the same)")
    up_latency: float = Field(0.05, ge=0, description="seconds before the first byte goes up")
    down_latency: float = Field(0.05, ge=0, description="seconds before the first byte comes down")
    on_seconds: float = Field(0.0, ge=0, description="mean seconds that a device stays reachable (0: always)")
    off_seconds: float = Field(0.0, ge=0, description="mean seconds that a device stays away")
    loss: float = Field(0.0, ge=0, lt=1, description="probability that an upload is lost")
    custom: bool = Field(False, description="the figures above do not hold: a Fleet was given from Python")

    @model_validator(mode="before")
    @classmethod
    def _both_or_none(cls, values: Any) -> Any:
        if isinstance(values, dict) and (values.get("on_seconds", 0) == 0) != (values.get("off_seconds", 0) == 0):
            raise ValueError("on_seconds and off_seconds must both be 0 (always reachable) or both be positive")
        return values

    def draw(self, seed: int) -> "Fleet":
        """The devices: training seconds uniform between fastest and ratio x fastest, the two ends included."""
        rng = stream(seed, "fleet")
        seconds = self.fastest * (1.0 + (self.ratio - 1.0) * rng.random(self.devices))
        if self.devices > 1:
            seconds[np.argmax(seconds)] = self.fastest * self.ratio
        seconds[np.argmin(seconds)] = self.fastest
        share = 1.0 / (1.0 + (self.link_ratio - 1.0) * rng.random(self.devices))
        return Fleet(
            train_seconds=seconds,
            up_rate=share * self.up_mbps * 1e6 / 8,
            down_rate=share * self.down_mbps * 1e6 / 8,
            up_latency=self.up_latency,
            down_latency=self.down_latency,
            on_seconds=self.on_seconds,
            off_seconds=self.off_seconds,
            loss=self.loss,
            seed=seed,
        )


@dataclass
class Fleet:
    """Per-device figures: seconds per local training, bytes per second up and down."""

    train_seconds: Floats
    up_rate: Floats
    down_rate: Floats
    up_latency: float = 0.0
    down_latency: float = 0.0
    on_seconds: float = 0.0
    off_seconds: float = 0.0
    loss: float = 0.0
    seed: int = 0
    _switches: dict[int, tuple[bool, list[float], np.random.Generator]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.train_seconds)

    def up(self, device: int, size: int) -> float:
        """Seconds until ``size`` bytes from the device have reached the server."""
        return self.up_latency + size / self.up_rate.item(device)

    def down(self, device: int, size: int) -> float:
        """Seconds until ``size`` bytes from the server have reached the device."""
        return self.down_latency + size / self.down_rate.item(device)

    def epoch(self, device: int, epochs: int) -> float:
        """Seconds per epoch, when a whole local training has ``epochs`` of them."""
        return self.train_seconds.item(device) / epochs

    def is_lost(self, device: int, trip: int) -> bool:
        """Whether this trip's upload gets lost on the way."""
        return self.loss > 0 and bool(stream(self.seed, "loss", device, trip).random() < self.loss)

    def available(self, device: int, time: float) -> bool:
        """Whether the device is reachable at this time."""
        if self.on_seconds == 0:
            return True
        starts_on, switches = self._until(device, time)
        return starts_on == (bisect_right(switches, time) % 2 == 0)

    def leaves(self, device: int, time: float) -> float:
        """When a device that is reachable now goes away."""
        if self.on_seconds == 0:
            return math.inf
        _, switches = self._until(device, time)
        return switches[bisect_right(switches, time)]

    def _until(self, device: int, time: float) -> tuple[bool, list[float]]:
        """The on/off switches of a device, drawn from its own stream as far as they are needed."""
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
