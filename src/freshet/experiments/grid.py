"""A grid of runs as plain data: methods x scenarios x seeds. Each run has a key, the hash of all that decides its bits.

Nothing here runs or reads a file: the same input gives the same jobs with the same keys.

The length of a run in virtual seconds follows from a number of synchronous rounds. A synchronous round with m' of n
devices lasts as long as its slowest trip (``sim.forecast``), so ``until = rounds * E[round]``. Every method of a
comparison, synchronous or not, runs for this time and is tested once per E[round]. Absences and lost uploads are not
counted.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import product
from statistics import fmean
from typing import Any

from freshet.config import SECTIONS, Config, DataOptions, ModelOptions, non_semantic_keys, override, resolve
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, method_name
from freshet.methods.loading import MethodRef
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
    from freshet.training.network import build_module, layout_of, with_own_parts

    data, model = DataOptions.model_validate_json(data_json), ModelOptions.model_validate_json(model_json)
    shape, classes, vocabulary = _samples(data)
    network = partial(
        build, model.name, input_shape=shape, classes=classes, head=model.head, norm=model.norm or None,
        vocabulary=vocabulary, **model.own(),
    )  # fmt: skip
    module = build_module(with_own_parts(network, model.local))
    return 4 * layout_of(module).size  # not on the meta device, which loads modules for a second


def _samples(data: DataOptions) -> tuple[tuple[int, ...], int, int | None]:
    """Shape of a sample, number of classes, and for texts the size of the vocabulary."""
    spec = CATALOGUE.get(data.name)
    if spec is not None:
        return spec.shape or (data.length,), spec.classes, spec.token_ids(data.vocabulary)
    from freshet.data.sources import load

    found = load(data.name, data.dir or None, vocabulary=data.vocabulary, length=data.length)
    return found.sample_shape, found.classes, found.vocabulary


def with_length(tables: Mapping[str, Mapping[str, Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Add ``run.until`` for this many synchronous rounds, and ``run.eval_every``; given values win.

    A learning rate that follows time also gets ``training.schedule_seconds``, the duration of such a round.
    """
    filled = {name: dict(table) for name, table in tables.items()}
    run, training = filled.setdefault("run", {}), filled.setdefault("training", {})
    by_time = training.get("schedule_by") == "time" and not training.get("schedule_seconds")
    if {"until", "eval_every"} <= run.keys() and not by_time:
        return filled
    config = resolve(tables)
    seconds = round_seconds(config)
    if by_time:
        training["schedule_seconds"] = _significant(seconds)
    until = config.run.until if "until" in run else rounds * seconds
    if "eval_every" in run:
        run.setdefault("until", _significant(until))
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


Tables = Mapping[str, Mapping[str, Any]]
#: Methods as Python callers give them.
Methods = str | Sequence[str | type | Mapping[str, Any]]
_KEY_DIGITS = 12


@dataclass(frozen=True)
class Entry:
    """One line of a comparison: a method or variant, with its own options if any."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        """The label as shown in tables, with marks that refer to footnotes."""
        return self.label + "".join(f" [{mark}]" for mark in class_and_preset(self.method)[0].marks())


def _no_settings(method: str) -> Tables:
    return {}


@dataclass(frozen=True)
class Scenario:
    """What all methods of one comparison share."""

    name: str = ""
    #: The settings of a method here, by its name; those of the user win.
    settings: Callable[[str], Tables] = field(default=_no_settings, compare=False)
    #: Options by method that win over a config file's.
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    #: Length of a run in synchronous rounds of its fleet; None: as the settings say.
    rounds: int | None = None
    #: The cell of the paper that this is, for the record.
    cell: str | None = None


@dataclass(frozen=True)
class UserSettings:
    """The settings of the user: a config file, results of tuning, single settings (later ones win)."""

    tables: Tables = field(default_factory=dict)
    tuned: Sequence[Tables] = ()
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Recipe:
    """How to rebuild a federation that comes from Python, under a configuration, and the hashes of its parts."""

    build: Callable[[Config], Any]
    hashes: Mapping[str, str]
    model_bytes: int


@dataclass(frozen=True)
class Job:
    """One run of the grid; it has a ``recipe`` if its federation comes from Python."""

    scenario: Scenario
    entry: Entry
    seed: int
    config: Config
    recipe: Recipe | None = field(default=None, compare=False)

    @cached_property
    def key(self) -> str:
        return run_key(self.config, {} if self.recipe is None else self.recipe.hashes)

    @property
    def model_bytes(self) -> int:
        """Bytes of the model on the wire."""
        return model_bytes(self.config) if self.recipe is None else self.recipe.model_bytes


def run_key(config: Config, hashes: Mapping[str, str] | None = None) -> str:
    """A run's name in a grid: method and seed for people, and the hash that identifies it.

    ``hashes`` of data, shards, model and fleet count too if they come from Python.
    """
    content: Any = [config.to_hash(), dict(hashes)] if hashes else config.to_hash()
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
    named = config.method_name.rpartition("/")[2]
    method = "".join(letter if letter.isalnum() or letter in "-_." else "." for letter in named)
    return f"{method}-seed{config.run.seed}-{digest}"


# ---- parsing methods and seeds


def parse_entries(text: str) -> list[Entry]:
    """Parse ``fedasmu,fedasync@alpha=0.4``: methods with commas between, options after @."""
    return check_entries([_entry(part.strip()) for part in text.split(",") if part.strip()])


def as_entries(methods: Methods) -> list[Entry]:
    """Entries of methods given in Python: text as above, classes, or dicts of a name or class and options."""
    if isinstance(methods, str):
        return parse_entries(methods)
    return check_entries([_entry_from_python(each) for each in methods])


def _entry_from_python(method: str | type | Mapping[str, Any]) -> Entry:
    if isinstance(method, str) and not isinstance(method, MethodRef):
        return _entry(method.strip())
    return _entry_from_table(method if isinstance(method, Mapping) else {"name": method})


def check_entries(entries: list[Entry]) -> list[Entry]:
    """Return the entries; raise if there are none, or two with one label."""
    if not entries:
        raise ConfigError("--methods", "give at least one method (see `freshet methods`)")
    labels = [entry.label for entry in entries]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError("--methods", f"{twice!r} is named twice")
    return entries


def _entry(text: str) -> Entry:
    name, *options = text.split("@")
    class_and_preset(name)
    table: dict[str, Any] = {}
    override(table, [f"method.{option}" for option in options])
    return Entry(text, name, table.get("method", {}))


def _entry_from_table(table: Mapping[str, Any]) -> Entry:
    options = {key: value for key, value in table.items() if key != "name"}
    name = method_name(table.get("name", ""))
    class_and_preset(name)
    return Entry("@".join([name, *(f"{key}={value}" for key, value in options.items())]), name, options)


def parse_seeds(text: str) -> list[int]:
    """Parse ``3`` as the seeds 0, 1, 2 and ``4,7`` as these two."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    seeds = numbers if "," in text else list(range(numbers[0])) if numbers else []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError("--seeds", f"expects a number of seeds, or different seeds as in 4,7; {text!r} was given")
    return seeds


# ---- settings to vary

#: One choice of values for the settings of a grid.
Choice = Mapping[str, Any]


def parse_grid(texts: Sequence[str]) -> list[Choice]:
    """Parse ``fleet.ratio=1,20`` and others like it: every combination of their values, in order."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or "." not in key or not values.strip():
            raise ConfigError("--grid", f"expects section.key=value,value,..., but {text!r} was given")
        grid[key.strip()] = _grid_values(values)
    return choices(grid)


def _grid_values(text: str) -> list[Any]:
    """The values with commas between, read as TOML, else as plain strings."""
    try:
        found: list[Any] = tomllib.loads(f"values = [{text}]")["values"]
    except ValueError:
        found = [part.strip() for part in text.split(",")]
    return found


def choices(grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Every combination of the values, the last setting changing fastest. Without settings there is one, empty."""
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(key, f"needs a list of values to compare, but {values!r} was given")
        if any(values.count(value) > 1 for value in values):
            raise ConfigError(key, f"names a value twice in {values!r}")
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def choice_name(choice: Choice, world: str = "") -> str:
    """The name of a combination: ``fleet.ratio=20, training.epochs=5``."""
    parts = ", ".join(f"{key}={value}" for key, value in choice.items())
    return ": ".join(part for part in (world, parts) if part)


def as_settings(choice: Choice) -> list[str]:
    """The combination as settings of the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in choice.items()]


# ---- from entries to jobs


def expand(
    entries: Sequence[Entry],
    seeds: Sequence[int],
    user: UserSettings | None = None,
    scenarios: Sequence[Scenario] = (Scenario(),),
) -> list[Job]:
    """Every run of the grid: by scenario, then by seed, so that early results cover all methods."""
    user = user or UserSettings()
    check_settings(user.settings, entries)
    jobs = [
        Job(scenario, entry, seed, resolve(_with_seed(tables, seed)))
        for scenario in scenarios
        for lines in [[(entry, tables_for(entry, scenario, user)) for entry in entries]]
        for seed in seeds
        for entry, tables in lines
    ]
    check_fair(jobs)
    return jobs


def tables_for(entry: Entry, scenario: Scenario, user: UserSettings) -> dict[str, dict[str, Any]]:
    """The settings of one line: scenario < config file < tuning < single settings < the entry's own options.

    The length of the run follows last, when the fleet is known.
    """
    tables: dict[str, dict[str, Any]] = {"method": {}}
    for layer in (scenario.settings(entry.method), user.tables):
        for section, values in layer.items():
            if section != "method":
                tables[section] = tables.get(section, {}) | dict(values)
        tables["method"] |= options_from(layer.get("method", {}), entry.method)
    tables["method"] |= dict(scenario.options.get(class_and_preset(entry.method)[0].about.name, {}))
    studies = {str(tuned["method"]["name"]): tuned for tuned in user.tuned}
    study = tuned_as(entry.method, studies)
    if study is not None:
        tables["method"] |= options_from(studies[study]["method"], entry.method)
        tables["training"] = tables.get("training", {}) | {"lr": studies[study]["training"]["lr"]}
    for setting in _in_order(user.settings, entry):
        override(tables, [setting])
    tables["method"] |= dict(entry.options) | {"name": entry.method}
    # Nobody extends a run of a grid: with another end it is another run.
    tables["run"] = {"keep_checkpoint": False} | _with_trigger(
        tables.get("run", {}), class_and_preset(entry.method)[0].about.kind
    )
    return tables if scenario.rounds is None else with_length(tables, scenario.rounds)


def same_family(one: str, other: str) -> bool:
    """Whether two names are the same method or variants of it."""
    return bool(one) and bool(other) and class_and_preset(one)[0] is class_and_preset(other)[0]


def tuned_as(method: str, studies: Collection[str]) -> str | None:
    """The study that tunes a method: its own, or that of the method that it is a variant of.

    Never another variant's: the best values of one may be bad for the next.
    """
    return next((name for name in (method, class_and_preset(method)[0].about.name) if name in studies), None)


def options_from(table: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The options of a method table that apply to another line: the same method, or a variant of it."""
    name = str(table.get("name", "fedasmu")) if table else ""
    if not same_family(name, method):
        return {}
    left = {"name"} | (_variants_own(table, name, method) if name != method else set())
    return {key: value for key, value in table.items() if key not in left}


def _variants_own(table: Mapping[str, Any], name: str, method: str) -> set[str]:
    """Options that one variant does not pass to another: a full config file would make all variants equal.

    These are the options that define the variants, and options with defaults that depend on them where the two differ:
    ``-course`` has its own rates, and ``-progress`` a weight of another scale.
    """
    found, preset = class_and_preset(method)
    switches = {key for variant in found.about.variants.values() for key in variant}
    theirs = {**class_and_preset(name)[1], **table}
    differing = [
        defaults
        for (switch, value), defaults in found.Options.conditional_defaults.items()
        if switch in switches and (theirs.get(switch) == value) != (preset.get(switch) == value)
    ]
    return switches.union(*differing)


def _in_order(settings: Sequence[str], entry: Entry) -> list[str]:
    """The settings for an entry, as ``section.key=value``; those with its exact name come last and win."""
    common, family, own = [], [], []
    for setting in settings:
        section, _, rest = setting.strip().partition(".")
        if section in SECTIONS:
            common.append(setting)
        elif section == entry.method:
            own.append(f"method.{rest}")
        elif same_family(section, entry.method) and section == class_and_preset(section)[0].about.name:
            family.append(f"method.{rest}")
    return common + family + own


def check_settings(settings: Sequence[str], entries: Sequence[Entry]) -> None:
    """Raise unless every ``--set`` names a shared section or a method of the grid."""
    families = {name for entry in entries for name in (entry.method, class_and_preset(entry.method)[0].about.name)}
    for setting in settings:
        section, _, rest = setting.strip().partition(".")
        if section == "method":
            named = f"{entries[0].method}.{rest}" if entries else f"METHOD.{rest}"
            raise ConfigError("--set", f"must name its method: {named} instead of {setting!r}")
        if section not in SECTIONS and section not in families:
            allowed = ", ".join([*SECTIONS, *sorted(families)])
            raise ConfigError("--set", f"{setting!r} applies to nothing here; it can begin with {allowed}")


def _with_trigger(run: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Add the trigger: rounds for synchronous methods, one kind for all asynchronous ones."""
    given = run.get("trigger", "auto")
    trigger = "rounds" if kind == "sync" else "auto" if given == "rounds" else given
    return dict(run) | {"trigger": trigger}


def _with_seed(tables: Tables, seed: int) -> dict[str, Any]:
    return {**tables, "run": dict(tables.get("run", {})) | {"seed": seed}}


# ---- fairness


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings that must not differ between the methods of a comparison; the learning rate may, it is tuned."""
    tables = config.identity()
    del tables["method"]
    tables["training"] = {key: value for key, value in tables["training"].items() if key != "lr"}
    tables["run"] = {key: value for key, value in tables["run"].items() if key != "trigger"}
    return tables


def check_fair(jobs: Iterable[Job]) -> None:
    """Raise if two methods of the grid have different data, devices, networks, seeds or triggers."""
    first: dict[tuple[str, int], Job] = {}
    triggers: dict[tuple[str, str], Job] = {}
    for job in jobs:
        other = first.setdefault((job.scenario.name, job.seed), job)
        mine, theirs = shared_settings(job.config), shared_settings(other.config)
        for section, values in mine.items():
            for key, value in values.items():
                if value != theirs[section][key]:
                    problem = (
                        f"differs between {other.entry.label} ({theirs[section][key]}) and {job.entry.label} ({value})"
                    )
                    raise ConfigError(f"{section}.{key}", problem)
        _check_same_world(job, other)
        kind = class_and_preset(job.entry.method)[0].about.kind
        peer = triggers.setdefault((job.scenario.name, kind), job)
        if job.config.run.trigger != peer.config.run.trigger:
            raise ConfigError("run.trigger", f"differs between {peer.entry.label} and {job.entry.label}")


def _check_same_world(job: Job, other: Job) -> None:
    """Raise unless federations from Python have the same data, shards and fleet; models may differ (MOON's head)."""
    if job.recipe is None or other.recipe is None:
        return
    for part in ("data", "shards", "fleet"):
        if job.recipe.hashes[part] != other.recipe.hashes[part]:
            problem = f"gives other {part} to {job.entry.label} than to {other.entry.label} for seed {job.seed}"
            raise ConfigError("make", f"{problem}; all methods of a comparison need the same")


# ---- notes for the results


def override_note(settings: Sequence[str]) -> list[str]:
    """A note on the settings that change results, if there are any."""
    names = [s for s in settings if s.partition("=")[0].strip() not in non_semantic_keys(SECTIONS)]
    return [f"changed by --set: {', '.join(names)}"] if names else []


def length_notes(jobs: Sequence[Job]) -> list[str]:
    """How long the runs of each cell are; one sentence per scenario."""
    configs = {job.scenario: job.config for job in reversed(jobs) if job.scenario.rounds is not None}
    return [length_note(config, scenario.name) for scenario, config in reversed(configs.items())]


# ---- time left


def seconds_left(done: Sequence[tuple[str, float, float]], todo: Sequence[tuple[str, float]]) -> float | None:
    """Estimate the real seconds left: ``done`` has (method, virtual, real seconds), ``todo`` (method, virtual seconds).

    Each method continues at its own pace; a method that has not run yet gets the mean pace of the others.
    """
    pace: dict[str, tuple[float, float]] = {}
    for label, virtual, real in done:
        before = pace.get(label, (0.0, 0.0))
        pace[label] = (before[0] + virtual, before[1] + real)
    virtual, real = (sum(column) for column in zip(*pace.values(), strict=True)) if pace else (0.0, 0.0)
    if virtual <= 0:
        return None
    known = {label: spent / length for label, (length, spent) in pace.items() if length > 0}
    return sum(length * known.get(label, real / virtual) for label, length in todo)
