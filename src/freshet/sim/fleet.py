"""The fleet: how fast each device trains, what its links carry, when it is there, how often an upload is lost."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freshet.core.streams import stream
from freshet.options import FleetOptions

Floats = NDArray[np.float64]


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

    @staticmethod
    def draw(options: FleetOptions, seed: int) -> "Fleet":
        """Devices at random: training seconds uniform between fastest and ratio x fastest, the two ends included."""
        rng = stream(seed, "fleet")
        seconds = options.fastest * (1.0 + (options.ratio - 1.0) * rng.random(options.devices))
        if options.devices > 1:
            seconds[np.argmax(seconds)] = options.fastest * options.ratio
        seconds[np.argmin(seconds)] = options.fastest
        share = 1.0 / (1.0 + (options.link_ratio - 1.0) * rng.random(options.devices))
        return Fleet(
            train_seconds=seconds,
            up_rate=share * options.up_mbps * 1e6 / 8,
            down_rate=share * options.down_mbps * 1e6 / 8,
            up_latency=options.up_latency,
            down_latency=options.down_latency,
            on_seconds=options.on_seconds,
            off_seconds=options.off_seconds,
            loss=options.loss,
            seed=seed,
        )

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
