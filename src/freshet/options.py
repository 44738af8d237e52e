"""Settings that the configuration checks and a driver reads, below both."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.config import JsonDict

from freshet.core.admission import FACTOR
from freshet.core.method import Options
from freshet.errors import ConfigError

#: Said at a field that decides none of a run's bits: where it finds data, where it trains, how often it is saved, what
#: its accuracy is held against. Any other field does decide, and two runs that differ in it are different runs.
ASIDE: JsonDict = {"decides": False}


class FleetOptions(Options):
    """A fleet drawn at random; both ends of the speed range are present."""

    devices: int = Field(40, ge=1, description="number of devices (the paper's m)")
    fastest: float = Field(10.0, gt=0, description="seconds that the fastest device needs for one local training")
    ratio: float = Field(5.0, ge=1, description="slowest device's training time over the fastest's, for the same work")
    time: Literal["work", "trip"] = Field(
        "work",
        description="what takes time: work (steps x batch; 5 epochs of an average shard take the device's seconds), or "
        "trip (a whole local training takes the device's seconds, whatever it does: the paper's)",
    )
    up_mbps: float = Field(10.0, gt=0, description="uplink of a device in Mbit/s")
    down_mbps: float = Field(50.0, gt=0, description="downlink of a device in Mbit/s")
    link_ratio: float = Field(1.0, ge=1, description="best link over worst link (1: all the same)")
    up_latency: float = Field(0.05, ge=0, description="seconds before the first byte goes up")
    down_latency: float = Field(0.05, ge=0, description="seconds before the first byte comes down")
    on_seconds: float = Field(0.0, ge=0, description="mean seconds that a device stays reachable (0: always)")
    off_seconds: float = Field(0.0, ge=0, description="mean seconds that a device stays away")
    loss: float = Field(0.0, ge=0, lt=1, description="probability that an upload is lost")
    trace: str = Field(
        "", description="file (.csv, .json) with the devices' speeds, rates and absences; it comes before the above"
    )
    measured: str = Field(
        "", description="run directory of a deployment: its devices, as fast as they were; it comes before the above"
    )
    custom: bool = Field(False, description="the figures above do not hold: a Fleet was given from Python")

    @model_validator(mode="before")
    @classmethod
    def _both_or_none(cls, values: Any) -> Any:
        if isinstance(values, dict) and (values.get("on_seconds", 0) == 0) != (values.get("off_seconds", 0) == 0):
            raise ValueError("on_seconds and off_seconds must both be 0 (always reachable) or both be positive")
        return values


class Guards(Options):
    """What keeps a run sound and going: a part of its [run] section."""

    gate: float | str = Field(
        FACTOR,
        description="an upload is rejected whose step is longer than so many times the median of the last ones, and "
        "longer than the model it began from (off: none is)",
    )
    round_deadline: float = Field(
        0.0,
        ge=0,
        description="a trip without an upload after so many seconds is given up, so that its round can end; its device "
        "is not triggered again before it is heard of (0: never)",
    )
    rotate_log: float = Field(
        0.0,
        ge=0,
        description="once so many megabytes of the log can never be cut off again by `freshet resume`, they are "
        "compressed to `events-000001.jsonl.zst` and so on (0: never; needs the extra `zst`)",
        json_schema_extra=ASIDE,
    )

    @field_validator("gate")
    @classmethod
    def _generous(cls, value: float | str) -> float | str:
        if value == "off" or (isinstance(value, float) and value >= 2):
            return value
        raise ValueError('must be "off" or a factor of at least 2')


def seconds(text: str) -> float:
    """``600``, ``600s``, ``10m`` or ``2h`` as seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text and text[-1] in units else (text, "s")
    try:
        value = float(number) * units[unit]
    except ValueError:
        raise ConfigError(
            "run.until", f"expects seconds such as 600, 600s, 10m or 2h, but {text!r} was given"
        ) from None
    if not 0 < value < float("inf"):
        raise ConfigError("run.until", f"must be a positive, finite time, but {text!r} was given")
    return value
