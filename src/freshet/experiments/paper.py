"""The paper's experiments as named suites, each a grid over the same machinery as a comparison.

What the paper does not say and we decide: in ``heterogeneity`` the fastest device stays as fast as it is, and the
length of the run and its test interval grow with the mean training time, so that every ratio sees as many trips as
ratio 5; in ``slots`` the cell is LeNet on CIFAR-10.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from freshet.config import override
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.experiments.cells import CELLS, METHODS, Cell
from freshet.experiments.grid import ASIDE, Entry, Job, Request, World, expand, parse_entries
from freshet.experiments.presets import find_cell
from freshet.experiments.results import published
from freshet.methods import registry
from freshet.sim.fleet import FleetOptions

#: A round needs at least so many devices, a federation so many times more.
FEWEST_PER_ROUND = 2
FEWEST_DEVICES = 4
FEWEST_ROUNDS = 5
FEWEST_SAMPLES_PER_DEVICE = 20
UNITS = (
    "the paper names no unit of time, no device speed and no bandwidth: "
    "compare its times with each other, not with ours"
)


@dataclass(frozen=True)
class Setting:
    """One value of what a suite varies."""

    name: str = ""
    devices: int | None = None
    ratio: float | None = None
    bandwidth: float = 1.0

    @property
    def normal(self) -> bool:
        """Whether this is the world of the paper's main table."""
        return self.devices in (None, 100) and self.ratio in (None, 5.0) and self.bandwidth == 1.0


@dataclass(frozen=True)
class Suite:
    """A named experiment of the paper."""

    name: str
    title: str
    cells: tuple[str, ...]
    methods: tuple[str, ...]
    settings: tuple[Setting, ...] = (Setting(),)
    #: What the paper says came out, in words; for ``table`` the numbers stand beside ours.
    published: tuple[str, ...] = ()


_LENET = ("lenet-fmnist",)
_SUITES = (
    Suite("table", "the main table: twelve cells, twelve methods", tuple(CELLS), METHODS),
    Suite(
        "devices",
        "number of devices",
        _LENET,
        METHODS,
        tuple(Setting(f"{count} devices", devices=count) for count in (100, 200, 250)),
        (
            "FedASMU: accuracy +0.49 % to +12.51 %, 19.83 % to 90.17 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +0.1 % to +13.38 %, 54.5 % to 91.32 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "heterogeneity",
        "slowest over fastest device",
        _LENET,
        METHODS,
        tuple(Setting(f"ratio {ratio:g}", ratio=ratio) for ratio in (5.0, 110.0, 440.0)),
        (
            "FedASMU: accuracy +4.65 % to +7.07 %, 7.12 % to 69.75 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +6.28 % to +12.38 %, 68.37 % to 79.44 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "bandwidth",
        "bandwidth of the devices",
        _LENET,
        METHODS,
        (
            Setting("bandwidth 1"),
            Setting("bandwidth 1/50", bandwidth=1 / 50),
            Setting("bandwidth 1/100", bandwidth=1 / 100),
        ),
        (
            "FedASMU: accuracy +3.3 % to +11.93 % at 1/50, +2.97 % to +12.38 % at 1/100; "
            "43.1 % to 87.3 % and 31.28 % to 85.66 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +1.15 % to +4.58 % at 1/50, +2.88 % to +6.1 % at 1/100; "
            "42.2 % to 51.82 % and 16.59 % to 81.78 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "ablation",
        "FedASMU without its parts",
        ("lenet-cifar10", "cnn-cifar10"),
        ("fedasmu", "fedasmu-da", "fedasmu-fa", "fedasmu-0", "fedavg"),
        published=(
            "FedASMU over -DA: accuracy +1.38 % to +4.32 %; over -FA: +1.75 % to +4.71 %, 44.77 % to 73.96 % faster",
            "-DA over -0: accuracy +1.04 % to +3.41 %, 15.71 % to 19.54 % faster; -FA over -0: +0.65 % to +3.04 %",
            "-0 over FedAvg: accuracy +0.08 % to +0.34 %, 67.84 % to 82.26 % faster",
        ),
    ),
    Suite(
        "slots",
        "when to ask for the fresh model",
        ("lenet-cifar10",),
        ("fedasmu@slot=rl", "fedasmu@slot=h1", "fedasmu@slot=h2", "fedasmu@slot=h3"),
        published=("the learned slot over H1, H2, H3: accuracy +2.4 %, +2.2 %, +2.8 %",),
    ),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}


def find_suite(name: str) -> Suite:
    """The suite of this name."""
    if name not in SUITES:
        raise ConfigError("SUITE", f"{name!r} is not known; choose one of {', '.join(SUITES)}")
    return SUITES[name]


@dataclass(frozen=True)
class Plan:
    """A suite ready to run."""

    suite: Suite
    jobs: list[Job]
    scale: float
    notes: list[str]

    @property
    def stem(self) -> str:
        """Name of the result files; a scaled-down suite never overwrites the full one."""
        return self.suite.name if self.scale == 1.0 else f"{self.suite.name}-scale{self.scale:g}"

    @property
    def title(self) -> str:
        said = "" if self.scale == 1.0 else f", SCALED DOWN to {self.scale:g}"
        return f"{self.suite.name}: {self.suite.title}{said}"

    @property
    def scaled(self) -> dict[str, Any] | None:
        """What the results say about the scale; None for the full suite."""
        if self.scale == 1.0:
            return None
        return {
            "scale": self.scale,
            "meaning": "devices, devices per round, K of buffers, samples and rounds times this",
        }


def plan(
    suite: Suite,
    seeds: Sequence[int],
    *,
    scale: float = 1.0,
    methods: str | None = None,
    cells: str | None = None,
    settings: Sequence[str] = (),
) -> Plan:
    """The grid of a suite: its worlds, scaled down if asked, times its methods (or some of them) times the seeds."""
    if not 0 < scale <= 1:
        raise ConfigError("--scale", f"must be above 0 and at most 1, but {scale:g} was given")
    entries = _entries(suite, methods)
    chosen = [find_cell(name.strip()) for name in (cells.split(",") if cells else suite.cells)]
    changed: dict[str, Any] = {}
    override(changed, settings)
    dataset = changed.get("data", {}).get("name")
    worlds = [_world(cell, setting, scale, dataset) for cell in chosen for setting in suite.settings]
    if not as_published(settings):
        worlds = [replace(world, published=False) for world in worlds]
    jobs = expand(entries, seeds, Request(settings=settings), worlds)
    return Plan(suite, jobs, scale, _notes(suite, jobs, scale, settings))


def as_published(settings: Sequence[str]) -> bool:
    """Whether the paper's numbers may stand beside runs with these settings: same data, network and devices."""
    return not any(s.partition(".")[0] in ("data", "model", "fleet") and not s.startswith("data.dir") for s in settings)


def _entries(suite: Suite, methods: str | None) -> list[Entry]:
    """The suite's methods, or those of them that were asked for; other methods may be added by name."""
    return parse_entries(methods if methods else ",".join(suite.methods))


def _world(cell: Cell, setting: Setting, scale: float, dataset: str | None) -> World:
    """A cell under one setting of a suite, scaled down."""
    varied = replace(
        cell, devices=setting.devices or cell.devices, slowest_over_fastest=setting.ratio or cell.slowest_over_fastest
    )
    name = f"{cell.name}, {setting.name}" if setting.name else cell.name
    tables = _merged(_varied(varied, cell, setting, scale), _scaled(varied, scale, dataset))
    return World(name, varied, tables, setting.normal, _buffers(tables.get("run", {}).get("per_round", 10) / 10))


def _varied(varied: Cell, cell: Cell, setting: Setting, scale: float) -> dict[str, dict[str, Any]]:
    """What a setting changes: links, or the length of the run where training takes longer."""
    tables: dict[str, dict[str, Any]] = {}
    if setting.bandwidth != 1.0:
        normal = FleetOptions()
        links = {"up_mbps": normal.up_mbps, "down_mbps": normal.down_mbps}
        tables["fleet"] = {key: rate * setting.bandwidth for key, rate in links.items()}
    longer = (1 + varied.slowest_over_fastest) / (1 + cell.slowest_over_fastest)
    if longer != 1.0:
        rounds = _rounds(cell, scale)
        tables["run"] = {"until": rounds * cell.period * longer, "eval_every": cell.period * longer}
    return tables


def _rounds(cell: Cell, scale: float) -> int:
    return max(FEWEST_ROUNDS, round(cell.rounds * scale))


def _scaled(cell: Cell, scale: float, dataset: str | None) -> dict[str, dict[str, Any]]:
    """Fewer devices, samples and rounds; the share of devices that train at once and samples per device stay."""
    if scale == 1.0:
        return {}
    devices = max(FEWEST_DEVICES, round(cell.devices * scale))
    per_round = min(devices, max(FEWEST_PER_ROUND, round(cell.per_round * scale)))
    tables: dict[str, dict[str, Any]] = {
        "fleet": {"devices": devices},
        "run": {"per_round": per_round, "until": _rounds(cell, scale) * float(cell.period)},
    }
    spec = CATALOGUE.get(dataset or cell.dataset)
    if spec is not None:
        train, test = spec.counts[0]
        least = devices * FEWEST_SAMPLES_PER_DEVICE
        tables["data"] = {
            "train_samples": min(train, max(least, round(train * scale))),
            "test_samples": min(test, max(10 * spec.classes, round(test * scale))),
        }
    return tables


def _buffers(share: float) -> dict[str, dict[str, Any]]:
    """Methods that wait for K uploads wait for fewer when fewer devices train at once."""
    if share == 1.0:
        return {}
    usual = {
        name: method.Options.model_fields["K"].default
        for name, method in registry().items()
        if "K" in method.Options.model_fields
    }
    return {name: {"K": max(1, round(count * share))} for name, count in usual.items()}


def _merged(first: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Two layers of tables; ``first`` wins."""
    return {name: base.get(name, {}) | first.get(name, {}) for name in {**base, **first}}


def changed(settings: Sequence[str]) -> list[str]:
    """A sentence about settings that decide bits, if there are any."""
    names = [s for s in settings if s.partition("=")[0].strip() not in {f"run.{key}" for key in ASIDE}]
    return [f"changed by --set: {', '.join(names)}"] if names else []


def _notes(suite: Suite, jobs: Sequence[Job], scale: float, settings: Sequence[str]) -> list[str]:
    notes = []
    if scale != 1.0:
        config = jobs[0].config
        notes.append(
            f"SCALED DOWN to {scale:g}: {config.fleet.devices} devices, {config.run.per_round} per round, "
            f"{config.data.train_samples} training samples, {config.run.until:g} s in the first world; "
            "these are not the paper's conditions"
        )
    notes += changed(settings)
    notes += [f"published: {sentence}" for sentence in suite.published]
    if any(published(job.entry, job.world) for job in jobs):
        notes.append(UNITS)
    return notes
