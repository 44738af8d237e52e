"""How long a run of some synchronous rounds lasts: virtual seconds for a configuration's fleet and network.

A synchronous round with m' of n devices lasts as long as its slowest trip (``sim.forecast``), so
``until = rounds * E[round]``. Every method of a comparison, synchronous or not, runs for this time. Absences and lost
uploads are not counted.
"""

from collections.abc import Mapping
from functools import cache, partial
from statistics import fmean
from typing import Any

from freshet.config import Config, DataOptions, ModelOptions, resolve
from freshet.data.catalogue import CATALOGUE
from freshet.sim import forecast
from freshet.sim.fleet import Fleet, FleetOptions

#: The model is tested once per synchronous round, within these limits on the tests of a run.
FEWEST_TESTS, MOST_TESTS = 100, 500
#: E[round] is the mean over the fleets of this many seeds, so that all seeds run equally long.
FLEETS = 400


@cache
def _round(options: FleetOptions, per_round: int, size: int) -> float:
    fleets = (Fleet.draw(options, seed) for seed in range(FLEETS))
    return fmean(forecast.round_seconds(forecast.trip_seconds(fleet, size), per_round) for fleet in fleets)


def round_seconds(config: Config) -> float:
    """E[round] of a configuration's fleet and network, over fleets and draws of devices."""
    return _round(config.fleet, config.run.per_round, model_bytes(config))


def model_bytes(config: Config) -> int:
    """Bytes of a configuration's network on the wire: float32, with buffers."""
    return _bytes(config.data.model_dump_json(), config.model.model_dump_json())


@cache
def _bytes(data_json: str, model_json: str) -> int:
    from freshet.models.registry import build
    from freshet.training.network import build_module, layout_of

    data, model = DataOptions.model_validate_json(data_json), ModelOptions.model_validate_json(model_json)
    shape, classes, vocabulary = _samples(data)
    network = partial(
        build, model.name, input_shape=shape, classes=classes, head=model.head, norm=model.norm or None,
        vocabulary=vocabulary, **model.own(),
    )  # fmt: skip
    return 4 * layout_of(build_module(network)).size  # not on the meta device, which loads modules for a second


def _samples(data: DataOptions) -> tuple[tuple[int, ...], int, int | None]:
    """Shape of a sample, number of classes, and for texts the size of the vocabulary."""
    spec = CATALOGUE.get(data.name)
    if spec is not None and spec.kind == "text":
        return (data.length,), spec.classes, data.vocabulary
    if spec is not None:
        return spec.shape, spec.classes, None
    from freshet.data.sources import load

    found = load(data.name, data.dir or None, vocabulary=data.vocabulary, length=data.length)
    return found.sample_shape, found.classes, found.vocabulary


def with_length(tables: Mapping[str, Mapping[str, Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Add ``run.until`` for this many synchronous rounds, and ``run.eval_every``; given values win."""
    filled = {name: dict(table) for name, table in tables.items()}
    run = filled.setdefault("run", {})
    if {"until", "eval_every"} <= run.keys():
        return filled
    config = resolve(tables)
    seconds = round_seconds(config)
    until = config.run.until if "until" in run else rounds * seconds
    if "eval_every" in run:
        run["until"] = _significant(until)
        return filled
    tests = min(MOST_TESTS, max(FEWEST_TESTS, round(until / seconds)))
    run["eval_every"] = _significant(until / tests)
    run.setdefault("until", tests * run["eval_every"])
    return filled


def _significant(value: float) -> float:
    """Round to four digits: exact enough, and the same on every machine."""
    return float(f"{value:.4g}")


def length_note(config: Config, name: str = "") -> str:
    """A sentence on the length of this configuration's runs."""
    seconds = round_seconds(config)
    return (
        f"{name or 'length'}: {config.run.until:,g} s of virtual time for every method, as long as "
        f"{config.run.until / seconds:.0f} synchronous rounds of {seconds:.1f} s ({config.run.per_round} of "
        f"{config.fleet.devices} devices, ratio {config.fleet.ratio:g}, the slowest trip of each round); "
        f"tested every {config.run.eval_every:g} s"
    )
