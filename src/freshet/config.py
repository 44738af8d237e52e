"""A run's configuration: its sections, every value checked, defaults filled in, written back so that it runs again."""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from freshet.core.admission import GATE_FACTOR
from freshet.core.compression import LinkOptions
from freshet.core.defence import DefenceOptions
from freshet.core.layout import Layout
from freshet.core.method import NON_SEMANTIC, Facts, Method, Options, first_problem
from freshet.core.scheduling import Trigger, TriggerKind
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, method_name, method_options
from freshet.methods._shared.rounds import RoundMethod
from freshet.privacy import PrivacyOptions
from freshet.sim.fleet import FleetOptions
from freshet.sim.traces import read_trace
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import AttackOptions

#: The name that stands for data or a model brought from Python.
CUSTOM = "custom"
#: Tasks whose first metric is an accuracy.
JUDGED_BY_ACCURACY = ("classification", "binary", "tokens")
DEFAULT_MODELS = {
    "digits": "digits",
    "fashion-mnist": "lenet5",
    "cifar10": "lenet5",
    "cifar100": "lenet5",
    "imdb": "textcnn",
    "tiny-imagenet": "resnet20",
}


class DataOptions(Options):
    """Which data, and how they are dealt to the devices."""

    name: str = Field("digits", description="data set: see `freshet data list`")
    dir: str = Field(
        "",
        description="folder with the data sets (default: FRESHET_DATA, the cache, a download)",
        json_schema_extra=NON_SEMANTIC,
    )
    partition: Literal["dirichlet", "dirichlet_by_device", "iid", "by_label", "natural", "custom"] = Field(
        "dirichlet", description="how samples are dealt to devices (custom: shards given from Python)"
    )
    concentration: float = Field(0.3, gt=0, description="Dirichlet concentration: smaller is more uneven")
    min_samples: int = Field(5, ge=1, description="every device holds at least so many samples")
    shards_per_device: int = Field(2, ge=1, description="for partition by_label")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of the training set to test on instead of the test set"
    )
    train_samples: int = Field(0, ge=0, description="use only so many training samples (0: all)")
    test_samples: int = Field(0, ge=0, description="use only so many test samples (0: all)")
    lazy: bool = Field(
        False, description="a Dataset given from Python is read batch by batch and never held in memory as a whole"
    )
    input_column: str = Field(
        "", description="for a Hugging Face Dataset: column of the inputs (default: the only one)"
    )
    label_column: str = Field(
        "", description="for a Hugging Face Dataset: column of the labels (default: found by type)"
    )
    vocabulary: int = Field(20_000, ge=10, description="for texts: number of token ids")
    length: int = Field(256, ge=8, description="for texts: tokens per sample")


class ModelOptions(Options):
    """Which network. Options that only some networks have are refused by the others."""

    name: str = Field("", description="network: see `freshet models` (default: one that suits the data)")
    norm: Literal["", "batch", "group", "none"] = Field("", description="normalisation (default: the network's own)")
    head: bool = Field(False, description="MOON's projection head")
    start: str = Field("", description="safetensors file with weights to begin with (default: the network's own)")
    pool: bool | None = Field(None, description="cnn: a 2x2 max pool after each activation (default: false)")
    hidden: list[int] | None = Field(None, description="mlp: units of the hidden layers (default: [64])")
    hidden_layers: int | None = Field(None, description="vgg11: dense layers of 512 units (default: 2)")
    dropout: float | None = Field(None, description="vgg11, textcnn: dropout rate (default: 0.5)")
    embedding_dim: int | None = Field(None, description="textcnn: numbers per token (default: 300)")
    filters: int | None = Field(None, description="textcnn: filters of each width (default: 100)")
    widths: list[int] | None = Field(None, description="textcnn: tokens under a filter (default: [3, 4, 5])")

    def own(self) -> dict[str, Any]:
        """What was given of the options that a network has of its own."""
        return self.model_dump(exclude={"name", "norm", "head", "start"}, exclude_none=True)


class RunOptions(Options):
    """How long, how often tested, how devices are triggered, what keeps it sound."""

    gate: float | str = Field(
        GATE_FACTOR,
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
        json_schema_extra=NON_SEMANTIC,
    )

    seed: int = Field(0, ge=0, description="root of all random streams")
    until: float = Field(
        300.0,
        ge=0,
        description="end of the run in seconds of virtual time, or `10m`, `2h` (0: none; default with run.rounds)",
    )
    rounds: int = Field(
        0, ge=0, description="end of the run in rounds, an asynchronous one being per_round consumed uploads (0: none)"
    )
    eval_every: float = Field(10.0, gt=0, description="test the global model every so many seconds of virtual time")
    target: float | None = Field(
        0.8,
        description="accuracy whose first crossing is reported; of another task's metric, its value (default: none)",
        json_schema_extra=NON_SEMANTIC,
    )
    stop_at_target: bool = Field(False, description="end the run with the first test that reaches run.target")
    trigger: Literal["auto", "periodic", "concurrency", "rounds"] = Field(
        "auto", description="periodic: m' devices every period; concurrency: constant number; rounds: synchronous"
    )
    per_round: int = Field(10, ge=1, description="devices triggered at a time, all or none (the paper's m')")
    period: float = Field(10.0, gt=0, description="seconds between triggers (the paper's T)")
    executor: Literal["auto", "serial", "processes", "ray"] = Field(
        "auto",
        description="where training runs, with the same bits everywhere; auto: worker processes if they save more time "
        "than they take to start, by an estimate from model, samples, epochs and uploads, else this process",
        json_schema_extra=NON_SEMANTIC,
    )
    checkpoint_every: float = Field(
        0.0, ge=0, description="save every so many virtual seconds (0: not)", json_schema_extra=NON_SEMANTIC
    )
    checkpoint_minutes: float = Field(
        5.0, ge=0, description="save every so many minutes of real time (0: not)", json_schema_extra=NON_SEMANTIC
    )
    keep_checkpoint: bool = Field(
        True,
        description="a run that has ended keeps its last checkpoint, so that `freshet resume --until` can extend it",
        json_schema_extra=NON_SEMANTIC,
    )
    device_memory_mb: int = Field(
        512, ge=1, description="device memories beyond this many MiB go to disk", json_schema_extra=NON_SEMANTIC
    )
    address: str = Field(
        "",
        description="Ray cluster to use, host:port (default: RAY_ADDRESS, else one is started)",
        json_schema_extra=NON_SEMANTIC,
    )
    workers: int = Field(
        0, ge=0, description="worker processes (0: as many as there are cores)", json_schema_extra=NON_SEMANTIC
    )
    selection: Literal["uniform", "by_samples", "custom"] = Field(
        "uniform", description="which idle devices are triggered: any, or the more samples the likelier (or a function)"
    )
    in_flight: int = Field(
        30,
        ge=1,
        description="asynchronous methods: concurrency keeps so many devices busy; periodic triggers while fewer are",
    )
    diverged: Literal["stop", "continue"] = Field(
        "stop", description="what to do when a test loss is not finite, or above 1,000 times the first"
    )

    evaluate_devices: str | int = Field(
        "never",
        description="test the global model on every device: never, at the end, or a number N: every N-th test",
    )
    personalise: int = Field(
        0, ge=0, description="test it there also after so many steps of local training (0: not; changes nothing else)"
    )

    @field_validator("gate")
    @classmethod
    def _generous(cls, value: float | str) -> float | str:
        if value == "off" or (isinstance(value, float) and value >= 2):
            return value
        raise ValueError('must be "off" or a factor of at least 2')

    @field_validator("evaluate_devices")
    @classmethod
    def _when(cls, value: str | int) -> str | int:
        if value in ("never", "end") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError('must be "never", "end" or a whole number of tests from 1')

    @property
    def end(self) -> float:
        """The end in virtual time; infinity when only rounds are counted."""
        return self.until or math.inf


SECTIONS: dict[str, type[BaseModel]] = {
    "training": TrainingOptions,
    "fleet": FleetOptions,
    "data": DataOptions,
    "model": ModelOptions,
    "run": RunOptions,
    "links": LinkOptions,
    "defence": DefenceOptions,
    "attack": AttackOptions,
    "privacy": PrivacyOptions,
}

#: Settings that runs of earlier versions lack, with what those runs did. Their hashes stay valid.
ADDED_LATER: dict[str, Any] = {"training.fast": True}


@dataclass(frozen=True)
class Config:
    """A complete, consistent configuration."""

    method_name: str
    method: Any
    training: TrainingOptions
    fleet: FleetOptions
    data: DataOptions
    model: ModelOptions
    run: RunOptions
    links: LinkOptions
    defence: DefenceOptions
    attack: AttackOptions
    privacy: PrivacyOptions

    @property
    def method_class(self) -> type[Method]:
        return class_and_preset(self.method_name)[0]

    def tables(self) -> dict[str, dict[str, Any]]:
        """Every value used, defaults included, as TOML tables; what follows from elsewhere is left out."""
        tables = {"method": {"name": self.method_name} | self.method.model_dump(exclude_none=True)}
        return tables | {name: getattr(self, name).model_dump(exclude_none=True) for name in SECTIONS}

    def identity(self) -> dict[str, dict[str, Any]]:
        """Of the tables everything that decides the run's bits: equal essence, equal run."""
        aside = set(self.non_semantic())
        return {
            section: {key: value for key, value in table.items() if f"{section}.{key}" not in aside}
            for section, table in self.tables().items()
        }

    def to_hash(self) -> dict[str, dict[str, Any]]:
        """The essence for hashing. Settings in ``ADDED_LATER`` count only if they differ from what older runs did."""
        return {
            section: {key: value for key, value in table.items() if ADDED_LATER.get(f"{section}.{key}") != value}
            for section, table in self.identity().items()
        }

    def sha256(self) -> str:
        """A hash of the essence but for the end of the run, which may be put off."""
        tables = self.to_hash()
        run = {key: value for key, value in tables["run"].items() if key not in ("until", "rounds")}
        return hashlib.sha256(json.dumps(tables | {"run": run}, sort_keys=True, default=str).encode()).hexdigest()

    def non_semantic(self) -> list[str]:
        """``section.key`` of every setting that decides nothing, as said at its field.

        The target does decide where it ends the run; a length of the schedule is what the run has written of itself.
        """
        aside = non_semantic_keys({"method": type(self.method)} | SECTIONS)
        written = [] if self.training.schedule_rounds is None else ["training.schedule_rounds"]
        return written + [key for key in aside if not (key == "run.target" and self.run.stop_at_target)]

    def with_run(self, **run: Any) -> "Config":
        """The same configuration with other settings in [run]; None leaves one as it is."""
        given = self.run.model_dump(exclude_none=True) | {key: value for key, value in run.items() if value is not None}
        config = replace(self, run=check_section("run", self.tables() | {"run": given}))
        _check_together(config)
        return config

    def trigger(self) -> Trigger:
        kind: TriggerKind = self.run.trigger  # type: ignore[assignment]  # "auto" was resolved
        return Trigger(kind, self.run.per_round, self.run.period, self.run.in_flight)


def non_semantic_keys(sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """``section.key`` of the fields that say of themselves that they decide none of a run's bits."""
    return [
        f"{section}.{key}"
        for section, model in sections.items()
        for key, field in model.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("decides") is False
    ]


def resolve(tables: Mapping[str, Any]) -> Config:
    """Check tables of settings and fill in every default; raises ``ConfigError`` with one sentence."""
    check_tables(tables)
    tables = _with_trace(tables)
    given = dict(tables.get("method", {}))
    name = method_name(given.pop("name", "fedasmu"))
    method = method_options(name, given)
    parts: dict[str, Any] = {}
    for section in SECTIONS:
        parts[section] = check_section(section, tables)
    kind = class_and_preset(name)[0].about.kind
    parts["run"] = _with_trigger(parts["run"], kind)
    config = Config(name, method, **parts)
    _check_together(config)
    return config


def check_section(section: str, tables: Mapping[str, Any]) -> Any:
    """The options of one section, checked, with its defaults; raises ``ConfigError`` with one sentence."""
    model = SECTIONS[section]
    try:
        return model(**_with_defaults(section, tables))
    except ValidationError as error:
        raise first_problem(section, error, model) from None


def _with_defaults(section: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as given, with defaults that follow from other settings where nothing was given."""
    given = dict(tables.get(section, {}))
    if section == "run":
        if isinstance(given.get("until"), str):
            given["until"] = seconds(given["until"])
        if given.get("rounds"):
            given.setdefault("until", 0.0)
        if tables.get("training", {}).get("task", "classification") not in JUDGED_BY_ACCURACY:
            given.setdefault("target", None)
        devices = tables.get("fleet", {}).get("devices", FleetOptions().devices)
        if isinstance(devices, int) and devices >= 1:
            given.setdefault("per_round", min(10, devices))
            if isinstance(given["per_round"], int):
                given.setdefault("in_flight", max(1, min(3 * given["per_round"], devices)))
    if section == "model" and not given.get("name"):
        data = tables.get("data", {}).get("name", "digits")
        given["name"] = DEFAULT_MODELS.get(data, "mlp") if isinstance(data, str) else "mlp"
    return given


def _with_trace(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a trace is given and no number of devices, there are as many as it has."""
    fleet = tables.get("fleet", {})
    if not fleet.get("trace") or "devices" in fleet or not isinstance(fleet["trace"], str):
        return tables
    return {**tables, "fleet": {**fleet, "devices": len(read_trace(fleet["trace"]))}}


def _with_trigger(run: RunOptions, kind: str) -> RunOptions:
    natural = "rounds" if kind == "sync" else "periodic"
    if run.trigger == "auto":
        return run.model_copy(update={"trigger": natural})
    if (run.trigger == "rounds") != (kind == "sync"):
        allowed = "rounds" if kind == "sync" else "periodic or concurrency"
        raise ConfigError("run.trigger", f"this method is {kind}; use {allowed}, but {run.trigger!r} was given")
    return run


def _check_together(config: Config) -> None:
    """What no section can check alone."""
    devices, run, epochs = config.fleet.devices, config.run, config.training.epochs
    for key, value in (("per_round", run.per_round), ("in_flight", run.in_flight)):
        if value > devices:
            raise ConfigError(f"run.{key}", f"must be at most fleet.devices = {devices}, but {value} was given")
    if run.stop_at_target and run.target is None:
        raise ConfigError("run.stop_at_target", "needs a target; give run.target")
    if run.evaluate_devices != "never" and config.training.task != "classification":
        problem = f"is for classification, but the task is {config.training.task}; leave it at never"
        raise ConfigError("run.evaluate_devices", problem)
    if config.training.task in JUDGED_BY_ACCURACY and run.target is not None and not 0 <= run.target <= 1:
        raise ConfigError("run.target", f"is an accuracy and must be in 0..1, but {run.target:g} was given")
    if not (run.until or run.rounds):
        raise ConfigError("run.until", "must be greater than 0 (0 is for runs that end by run.rounds), but 0 was given")
    if config.model.name == CUSTOM and config.model.own():
        key = next(iter(config.model.own()))
        raise ConfigError(f"model.{key}", "is for a built-in network; a model from Python has its options there")
    if run.address and run.executor != "ray":
        raise ConfigError("run.address", f'is for run.executor = "ray", but that is "{run.executor}"; leave it out')
    if run.personalise and run.evaluate_devices == "never":
        problem = 'needs tests on the devices; set run.evaluate_devices to "end" or to a number of tests'
        raise ConfigError("run.personalise", problem)
    config.method_class.check(config.method, Facts(devices, epochs, run.per_round, run.in_flight))
    check_protection(config)


def load_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file of settings."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
        check_tables(tables)
        return tables
    except FileNotFoundError:
        raise ConfigError("--config", f"{path} does not exist") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("--config", f"{path} cannot be read as TOML (it is nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise ConfigError("--config", f"{path} cannot be read as TOML ({error})") from None


def check_tables(tables: Mapping[str, Any]) -> None:
    """Every section is known and is a table."""
    for section, value in tables.items():
        if section != "method" and section not in SECTIONS:
            raise ConfigError(section, f"is not a known section; known: method, {', '.join(SECTIONS)}")
        if not isinstance(value, Mapping):
            raise ConfigError(section, f"must be a table of settings, but {value!r} was given")


def with_method(tables: dict[str, Any], name: str) -> None:
    """Choose another method for given tables: options and trigger of the old one do not stay behind."""
    previous = tables.get("method", {})
    if previous.get("name") == name:
        return
    tables["method"] = {"name": name}
    trigger = tables.get("run", {}).get("trigger", "auto")
    if trigger != "auto" and (trigger == "rounds") != (class_and_preset(name)[0].about.kind == "sync"):
        del tables["run"]["trigger"]


def override(tables: dict[str, Any], assignments: Sequence[str]) -> None:
    """Apply ``section.key=value`` assignments; a value is read as TOML, else as a plain string."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            raise ConfigError("--set", f"expects section.key=value, but {assignment!r} was given")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            value = text.strip()
        except RecursionError:
            raise ConfigError(key.strip(), "is nested too deeply") from None
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(section, f"must be a table of settings, but {table!r} was given")
        table[name.strip()] = value


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


def check_protection(config: Config) -> None:
    """Raise a ``ConfigError`` for what no section can check alone."""
    if config.defence.rule == "multi-krum" and not issubclass(config.method_class, RoundMethod):
        problem = f"compares a round's uploads before any is used, but {config.method_name} uses each as it comes"
        raise ConfigError("defence.rule", f"multi-krum {problem}; use clip or median-distance")
    kind, task = config.attack.kind, config.training.task
    if kind in ("label-flip", "backdoor") and task != "classification":
        raise ConfigError("attack.kind", f"{kind} is for classification, but the task is {task}; use sign-flip")
    if config.privacy.on:
        _check_private(config)


def _check_private(config: Config) -> None:
    """All that leaves a device is covered by the noise, or does not depend on its samples."""
    leak = config.method_class.rule(config.method).leak()
    if leak is not None:
        raise ConfigError("privacy.clip", f"does not cover all that {config.method_name} sends: {leak}")
    if config.run.evaluate_devices != "never":
        problem = 'does not cover scores of the devices; set run.evaluate_devices to "never"'
        raise ConfigError("privacy.clip", problem)


def check_layout(config: Config, layout: Layout) -> None:
    """Raise a ``ConfigError`` for a network with something that noise must not touch."""
    if config.privacy.on and layout.size != layout.learnable:
        problem = "does not cover running statistics of the network; choose one without, or set model.norm to group"
        raise ConfigError("privacy.clip", problem)


def check_deployable(config: Config) -> None:
    """Raise a ``ConfigError`` for what only the simulator can do."""
    if not config.links.plain:
        problem = "is for simulations; over a network models travel as they are: leave links.down and links.up at none"
        raise ConfigError("links", problem)
    if config.attack.kind != "none":
        raise ConfigError("attack.kind", "is for simulations; leave it at none")
