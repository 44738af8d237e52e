"""A run's configuration: sections of checked settings with defaults, written back as a file that runs again."""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from freshet.core.admission import GATE_FACTOR
from freshet.core.compression import LinkOptions, smallest_budget
from freshet.core.defence import REPLACING, DefenceOptions
from freshet.core.layout import Layout
from freshet.core.method import ADDED, NON_SEMANTIC, SYNONYMS, Facts, Method, Options, first_problem, overrides
from freshet.core.scheduling import BY_LOSSES, Trigger, TriggerKind
from freshet.data.catalogue import CATALOGUE, Spec
from freshet.data.leaf import is_leaf, leaf_spec
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, method_name, method_options
from freshet.methods._shared.rounds import RoundMethod
from freshet.privacy import PrivacyOptions
from freshet.sim.fleet import FleetOptions
from freshet.sim.traces import read_trace
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import COLLUDING, AttackOptions

#: Stands for data, a model, a fleet or a function given from Python.
CUSTOM = "custom"
#: Tasks with an accuracy as their primary metric.
JUDGED_BY_ACCURACY = ("classification", "binary", "tokens", "huggingface")


class DataOptions(Options):
    """The data set and its partition over the devices."""

    name: str = Field("digits", description="data set: see `freshet data list`, or leaf:DIR for LEAF's files")
    dir: str = Field(
        "",
        description="folder with the data sets (default: FRESHET_DATA, the cache, a download)",
        json_schema_extra=NON_SEMANTIC,
    )
    partition: Literal["dirichlet", "dirichlet_by_device", "iid", "by_label", "natural", "custom"] = Field(
        "dirichlet",
        description="how samples are divided among devices (custom: shards, a function or a partitioner from Python)",
    )
    concentration: float = Field(0.3, gt=0, description="Dirichlet concentration: smaller is more uneven")
    min_samples: int = Field(5, ge=1, description="smallest number of samples per device")
    shards_per_device: int = Field(2, ge=1, description="shards of one label per device, for partition by_label")
    validation: float = Field(0.0, ge=0, lt=1, description="share of the training set that replaces the test set")
    train_samples: int = Field(0, ge=0, description="number of training samples to use (0: all)")
    test_samples: int = Field(0, ge=0, description="number of test samples to use (0: all)")
    lazy: bool = Field(
        False, description="read a Dataset given from Python batch by batch, never all of it into memory"
    )
    input_column: str = Field(
        "", description="for a Hugging Face Dataset: column of the inputs (default: the only one)"
    )
    label_column: str = Field(
        "", description="for a Hugging Face Dataset: column of the labels (default: found by type)"
    )
    vocabulary: int = Field(20_000, ge=10, description="for texts: number of token ids")
    length: int = Field(256, ge=8, description="for texts: tokens per sample (default for shakespeare: 80)")


class ModelOptions(Options):
    """The network. Options of one network are an error for another."""

    name: str = Field("", description="network: see `freshet models` (default: depends on the data set)")
    norm: Literal["", "batch", "group", "none"] = Field("", description="normalisation (default: the network's own)")
    head: bool = Field(False, description="MOON's projection head")
    start: str = Field("", description="safetensors file with the initial weights (default: random initialisation)")
    local: list[str] | None = Field(
        None,
        description="parts that stay on the devices and never travel: patterns of parameter names (`head.*`, `*bn*`) "
        "or of classes of layers (`BatchNorm*`); `last` is the last layer",
    )
    pool: bool | None = Field(None, description="cnn: a 2x2 max pool after each activation (default: false)")
    hidden: list[int] | None = Field(None, description="mlp: units of the hidden layers (default: [64])")
    hidden_layers: int | None = Field(None, description="vgg11: dense layers of 512 units (default: 2)")
    dropout: float | None = Field(
        None, description="vgg11, textcnn, charlstm: dropout rate (default: 0.5; charlstm: 0)"
    )
    embedding_dim: int | None = Field(
        None, description="textcnn, charlstm: size of a token's embedding (default: 300; charlstm: 32)"
    )
    units: int | None = Field(None, description="charlstm: units of an LSTM layer (default: 128)")
    layers: int | None = Field(None, description="charlstm: LSTM layers (default: 1)")
    last_only: bool | None = Field(
        None, description="charlstm: predict after the last character alone, not after each (default: false)"
    )
    filters: int | None = Field(None, description="textcnn: filters of each width (default: 100)")
    widths: list[int] | None = Field(None, description="textcnn: widths of the filters in tokens (default: [3, 4, 5])")

    def own(self) -> dict[str, Any]:
        """The options of this network that were given."""
        return self.model_dump(exclude={"name", "norm", "head", "start", "local"}, exclude_none=True)


class RunOptions(Options):
    """Length, tests, triggers, checkpoints and safeguards of a run."""

    gate: float | str = Field(
        GATE_FACTOR,
        description="norm bound: reject an upload if its step is longer than this factor times the recent median, and "
        'longer than the model it started from ("off" disables the bound)',
    )
    round_deadline: float = Field(
        0.0,
        ge=0,
        description="seconds after which a trip without an upload is given up, so that its round can end; its device "
        "is not triggered again until it reports (0: never)",
    )
    rotate_log: float = Field(
        0.0,
        ge=0,
        description="megabytes of log after which the part that `freshet resume` can no longer cut off is compressed "
        "to `events-000001.jsonl.zst` and so on (0: never; needs the extra `zst`)",
        json_schema_extra=NON_SEMANTIC,
    )

    seed: int = Field(0, ge=0, description="root of all random streams")
    until: float = Field(
        300.0,
        ge=0,
        description="end of the run in seconds of virtual time, or `10m`, `2h` (0: none, the default with run.rounds)",
    )
    rounds: int = Field(
        0,
        ge=0,
        description="end of the run in rounds; an asynchronous round is per_round used uploads, or in_flight with the "
        "trigger concurrency (0: none)",
    )
    eval_every: float = Field(10.0, gt=0, description="seconds of virtual time between tests of the global model")
    target: float | None = Field(
        0.8,
        description="target accuracy; a run reports when it is first reached. Other tasks: a value of their metric "
        "(no default)",
        json_schema_extra=NON_SEMANTIC,
    )
    stop_at_target: bool = Field(False, description="end the run at the first test that reaches run.target")
    patience: int = Field(
        0,
        ge=0,
        description="end the run after this many tests in a row without a better value of its metric (0: never)",
        json_schema_extra=ADDED,
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="model to save: last, or also the one with the best test (`best.safetensors`, "
        "`result.module(best=True)`)",
        json_schema_extra=NON_SEMANTIC,
    )
    trigger: Literal["auto", "periodic", "concurrency", "rounds"] = Field(
        "auto", description="periodic: m' devices every period; concurrency: constant number; rounds: synchronous"
    )
    per_round: int = Field(10, ge=1, description="devices triggered together (the paper's m')")
    period: float = Field(10.0, gt=0, description="seconds between triggers (the paper's T)")
    executor: Literal["auto", "serial", "processes", "ray"] = Field(
        "auto",
        description="where training runs; the bits are the same everywhere. auto: worker processes if they save more "
        "time than they take to start (estimated from model, samples, epochs and uploads), else this process",
        json_schema_extra=NON_SEMANTIC,
    )
    checkpoint_every: float = Field(
        0.0, ge=0, description="virtual seconds between checkpoints (0: none)", json_schema_extra=NON_SEMANTIC
    )
    checkpoint_minutes: float = Field(
        5.0, ge=0, description="minutes of real time between checkpoints (0: none)", json_schema_extra=NON_SEMANTIC
    )
    keep_checkpoint: bool = Field(
        True,
        description="keep the last checkpoint of a finished run, so that `freshet resume --until` can extend it",
        json_schema_extra=NON_SEMANTIC,
    )
    device_memory_mb: int = Field(
        512,
        ge=1,
        description="MiB of device memories to hold in RAM; the rest goes to disk",
        json_schema_extra=NON_SEMANTIC,
    )
    address: str = Field(
        "",
        description="Ray cluster to use, host:port (default: RAY_ADDRESS, else a new one)",
        json_schema_extra=NON_SEMANTIC,
    )
    workers: int = Field(0, ge=0, description="worker processes (0: one per core)", json_schema_extra=NON_SEMANTIC)
    selection: Literal["uniform", "by_samples", "power_of_choice", "oort", "custom"] = Field(
        "uniform",
        description="how idle devices are chosen: uniformly, with probability in proportion to their samples, by the "
        "losses that they report (Power-of-Choice, Oort), or by a function given from Python (custom)",
    )
    in_flight: int = Field(
        30,
        ge=1,
        description="asynchronous methods: devices that train at once (concurrency), or the number below which more "
        "are triggered (periodic)",
    )
    diverged: Literal["stop", "continue"] = Field(
        "stop", description="what to do when a test loss is not finite or exceeds 1,000 times the first"
    )

    evaluate_devices: str | int = Field(
        "never",
        description="test the global model on every device: never, end, or a number N (at every N-th test)",
    )
    personalise: int = Field(
        0, ge=0, description="steps of local training before a second test on each device (0: no second test)"
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
        """Every setting, defaults included, as TOML tables. Unset options are left out."""
        tables = {"method": {"name": self.method_name} | self.method.model_dump(exclude_none=True)}
        return tables | {name: getattr(self, name).model_dump(exclude_none=True) for name in SECTIONS}

    def identity(self) -> dict[str, dict[str, Any]]:
        """The settings that decide the run's bits. Equal identity, equal run."""
        aside = set(self.non_semantic())
        return {
            section: {key: value for key, value in table.items() if f"{section}.{key}" not in aside}
            for section, table in self.tables().items()
        }

    def to_hash(self) -> dict[str, dict[str, Any]]:
        """The identity for hashing. A setting that older runs lack counts only if it differs from its default."""
        models = {"method": type(self.method)} | SECTIONS
        return {
            section: {key: value for key, value in table.items() if not _is_added_default(models[section], key, value)}
            for section, table in self.identity().items()
        }

    def sha256(self) -> str:
        """A hash of the identity without the end of the run, which may change."""
        tables = self.to_hash()
        run = {key: value for key, value in tables["run"].items() if key not in ("until", "rounds")}
        return hashlib.sha256(json.dumps(tables | {"run": run}, sort_keys=True, default=str).encode()).hexdigest()

    def non_semantic(self) -> list[str]:
        """``section.key`` of every setting that does not change the run's bits, as declared at its field.

        The target counts if it ends the run. ``training.schedule_rounds`` does not count: the run derived it.
        """
        aside = non_semantic_keys({"method": type(self.method)} | SECTIONS)
        written = [] if self.training.schedule_rounds is None else ["training.schedule_rounds"]
        return written + [key for key in aside if not (key == "run.target" and self.run.stop_at_target)]

    def with_run(self, **run: Any) -> "Config":
        """The same configuration with other settings in [run]. None leaves a setting unchanged."""
        given = self.run.model_dump(exclude_none=True) | {key: value for key, value in run.items() if value is not None}
        config = replace(self, run=check_section("run", self.tables() | {"run": given}))
        _check_together(config)
        return config

    def trigger(self) -> Trigger:
        kind: TriggerKind = self.run.trigger  # type: ignore[assignment]  # "auto" was resolved
        return Trigger(kind, self.run.per_round, self.run.period, self.run.in_flight)


def non_semantic_keys(sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """``section.key`` of the fields that are declared not to change a run's bits."""
    return [
        f"{section}.{key}"
        for section, model in sections.items()
        for key in model.model_fields
        if _field_marks(model, key).get("decides") is False
    ]


def _field_marks(model: type[BaseModel], key: str) -> Mapping[str, Any]:
    """What a field declares besides its type, default and description."""
    extra = model.model_fields[key].json_schema_extra if key in model.model_fields else None
    return extra if isinstance(extra, dict) else {}


def with_added_settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an existing run, with what it did where it is older than a setting, whatever the default here."""
    found = {name: dict(table) for name, table in tables.items()}
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            if _field_marks(model, key).get("added") is True:
                found.setdefault(section, {}).setdefault(key, field.default)
    return found


def _is_added_default(model: type[BaseModel], key: str, value: Any) -> bool:
    return _field_marks(model, key).get("added") is True and value == model.model_fields[key].default


def resolve(tables: Mapping[str, Any]) -> Config:
    """Check tables of settings and fill in every default; raises ``ConfigError`` with one sentence."""
    check_tables(tables)
    tables = _with_data_defaults(_with_trace(tables))
    given = dict(tables.get("method", {}))
    name = method_name(given.pop("name", "fedasmu"))
    method = method_options(name, given)
    if class_and_preset(name)[0].rule(method).needs_own_parts:
        tables = {**tables, "model": {"local": ["last"]} | dict(tables.get("model", {}))}
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
    """The given settings of a section, with defaults that follow from other settings."""
    given = dict(tables.get(section, {}))
    if section == "run":
        if isinstance(given.get("until"), str):
            given["until"] = seconds(given["until"])
        if given.get("rounds"):
            given.setdefault("until", 0.0)
        if tables.get("training", {}).get("task", "classification") not in JUDGED_BY_ACCURACY:
            given.setdefault("target", None)
        classes = tables.get("training", {}).get("task", "classification") == "classification"
        private = tables.get("privacy", {}).get("clip", 0.0)  # it does not cover scores of the devices
        if tables.get("model", {}).get("local") and classes and not private:
            given.setdefault("evaluate_devices", "end")
        if private and tables["privacy"].get("where") == "server":
            given.setdefault("gate", "off")  # clipping bounds every step, and nothing may depend on single ones
        devices = tables.get("fleet", {}).get("devices", FleetOptions().devices)
        if isinstance(devices, int) and devices >= 1:
            given.setdefault("per_round", min(10, devices))
            if isinstance(given["per_round"], int):
                given.setdefault("in_flight", max(1, min(3 * given["per_round"], devices)))
    if section == "model" and not given.get("name"):
        spec = _spec(tables)
        given["name"] = "mlp" if spec is None else spec.model
    return given


def _spec(tables: Mapping[str, Any]) -> Spec | None:
    """The catalogue's entry of the data set that is named, or one made for a folder of LEAF's files."""
    data = tables.get("data", {})
    name = data.get("name", "digits")
    if is_leaf(name):
        return leaf_spec(name, data.get("dir") or None)
    return CATALOGUE.get(name) if isinstance(name, str) else None


def _with_data_defaults(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the data set suggests, below what is given: task, tokens per sample, its natural clients as devices."""
    data, model, fleet = (tables.get(name, {}) for name in ("data", "model", "fleet"))
    complete = "partition" in data and model.get("name") and "devices" in fleet
    if is_leaf(data.get("name")) and complete:  # as written by a run; its files may not be at hand
        return tables
    spec = _spec(tables)
    if spec is None:
        return tables
    found = {**tables, **{name: follows | tables.get(name, {}) for name, follows in spec.defaults().items()}}
    if spec.clients and found["data"]["partition"] == "natural":
        found["fleet"] = {"devices": spec.clients} | dict(fleet)
    if spec.options and not model.get("name"):
        found["model"] = spec.options | dict(model)
    return found


def _with_trace(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """With a trace and no number of devices, the trace decides the number."""
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
    """Check what no section can check alone."""
    devices, run, epochs = config.fleet.devices, config.run, config.training.epochs
    for key, value in (("per_round", run.per_round), ("in_flight", run.in_flight)):
        if value > devices:
            raise ConfigError(f"run.{key}", f"must be at most fleet.devices = {devices}, but {value} was given")
    if run.stop_at_target and run.target is None:
        raise ConfigError("run.stop_at_target", "needs a target; give run.target")
    if run.evaluate_devices != "never" and config.training.task not in ("classification", "huggingface"):
        problem = f"is for classification, but the task is {config.training.task}; leave it at never"
        raise ConfigError("run.evaluate_devices", problem)
    if config.training.task in JUDGED_BY_ACCURACY and run.target is not None and not 0 <= run.target <= 1:
        raise ConfigError("run.target", f"is an accuracy and must be in 0..1, but {run.target:g} was given")
    if not (run.until or run.rounds):
        raise ConfigError("run.until", "must be greater than 0 unless run.rounds ends the run, but 0 was given")
    if config.model.name == CUSTOM and config.model.own():
        key = next(iter(config.model.own()))
        raise ConfigError(f"model.{key}", "is for a built-in network; set the options of your own model in Python")
    if run.address and run.executor != "ray":
        raise ConfigError("run.address", f'is for run.executor = "ray", but that is "{run.executor}"; leave it out')
    if run.personalise and run.evaluate_devices == "never":
        problem = 'needs tests on the devices; set run.evaluate_devices to "end" or to a number of tests'
        raise ConfigError("run.personalise", problem)
    if config.training.trainer == CUSTOM:
        _check_own_trainer(config)
    config.method.check_run(Facts(devices, epochs, run.per_round, run.in_flight))
    check_protection(config)


def _check_own_trainer(config: Config) -> None:
    """What only the built-in loop can do."""
    if config.run.selection in BY_LOSSES:
        problem = f"{config.run.selection} selects by losses that the built-in loop reports"
        raise ConfigError("run.selection", f"{problem}; choose another with your own trainer")
    if config.run.personalise:
        raise ConfigError("run.personalise", "trains with the built-in loop; leave it at 0 with your own trainer")
    if config.attack.kind in ("label-flip", "backdoor"):
        problem = f"{config.attack.kind} changes the batches of the built-in loop; use sign-flip with your own trainer"
        raise ConfigError("attack.kind", problem)


def load_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file of settings, or a YAML file (``.yaml``, ``.yml``)."""
    kind = "YAML" if path.suffix.lower() in (".yaml", ".yml") else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        tables = _load_yaml(text) if kind == "YAML" else tomllib.loads(text)
        check_tables(tables)
        return tables
    except FileNotFoundError:
        raise ConfigError("--config", f"{path} does not exist") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("--config", f"{path} cannot be read as {kind} (it is nested too deeply)") from None
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError("--config", f"{path} cannot be read as {kind} ({problem})") from None


def _load_yaml(text: str) -> Any:
    """Read YAML as people mean it: ``1e-3`` is a number, ``off`` is a text. References are refused."""
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError("--config", "YAML needs PyYAML: pip install 'freshet-fl[yaml]'; or give TOML") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has references with *, which settings do not need")
            return super().compose_node(parent, index)

    plain = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in plain] for first, found in resolvers.items()
    }
    Loader.add_implicit_resolver(plain[0], re.compile(r"true|false"), list("tf"))
    number = r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+)"
    Loader.add_implicit_resolver(plain[1], re.compile(number), list("-+.0123456789"))
    try:
        found = yaml.load(text, Loader)  # noqa: S506, since it is a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("it has no sections")
    return found


def check_tables(tables: Mapping[str, Any]) -> None:
    """Check that every section is known and is a table."""
    for section, value in tables.items():
        if section != "method" and section not in SECTIONS:
            raise ConfigError(section, f"is not a known section; {_section_hint(section)}")
        if not isinstance(value, Mapping):
            raise ConfigError(section, f"must be a table of settings, but {value!r} was given")


def _section_hint(section: str) -> str:
    """What the user may have meant by an unknown section."""
    names = ["method", *SECTIONS]
    close = get_close_matches(section.lower(), names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def find_settings(key: str) -> dict[str, list[str]]:
    """The settings that a user means by a section, ``section.key``, or a key alone: keys by section."""
    key = SYNONYMS.get(key, key)
    section, _, name = key.strip("[] ").rpartition(".")
    if not section and name in SECTIONS:
        return {name: list(SECTIONS[name].model_fields)}
    found = {each: [name] for each, model in SECTIONS.items() if name in model.model_fields and section in ("", each)}
    if found:
        return found
    known = [f"{each}.{field}" for each, model in SECTIONS.items() for field in model.model_fields]
    ends = {each.partition(".")[2]: each for each in known}
    close = get_close_matches(key, known, n=1) or [ends[each] for each in get_close_matches(name, ends, n=1)]
    hint = f"did you mean {close[0]}?" if close else "freshet settings lists all"
    raise ConfigError(key, f"is not a known setting; {hint}")


def with_method(tables: dict[str, Any], name: str) -> None:
    """Choose another method in these tables. Options and trigger of the old one are dropped."""
    previous = tables.get("method", {})
    if previous.get("name") == name:
        return
    tables["method"] = {"name": name}
    trigger = tables.get("run", {}).get("trigger", "auto")
    if trigger != "auto" and (trigger == "rounds") != (class_and_preset(name)[0].about.kind == "sync"):
        del tables["run"]["trigger"]


def override(tables: dict[str, Any], assignments: Sequence[str]) -> None:
    """Apply ``section.key=value`` assignments. A value is read as TOML, else as a plain string."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            meant = [f"{each}.{key.strip()}" for each, model in SECTIONS.items() if key.strip() in model.model_fields]
            meant = meant or [known for known in [SYNONYMS.get(key.strip())] if known]
            hint = (
                f"; did you mean {' or '.join(f'{each}={text.strip()}' for each in meant)}?" if meant and equals else ""
            )
            raise ConfigError("--set", f"expects section.key=value, but {assignment!r} was given{hint}")
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
    if config.defence.rule in REPLACING and config.method_class.about.name in ("scaffold", "feddyn", "fedac"):
        problem = f"replaces updates, but {config.method_name}'s devices keep sums of their own updates"
        raise ConfigError("defence.rule", f"{config.defence.rule} {problem}; use clip or multi-krum")
    kind, task = config.attack.kind, config.training.task
    if kind in ("label-flip", "backdoor") and task != "classification":
        raise ConfigError("attack.kind", f"{kind} is for classification, but the task is {task}; use sign-flip")
    if kind in COLLUDING and config.links.up != "none":
        raise ConfigError("attack.kind", f'{kind} forges whole models; set links.up to "none"')
    if config.run.selection != "uniform" and overrides(config.method_class, Method, "select"):
        raise ConfigError("run.selection", f"{config.method_name} selects devices itself; leave it at uniform")
    if config.privacy.on:
        _check_private(config)


def _check_private(config: Config) -> None:
    """All that leaves a device is covered by the noise, or does not depend on its samples."""
    if config.privacy.on_server:
        _check_private_sum(config)
    leak = config.method_class.rule(config.method).leak()
    if leak is not None and config.privacy.on_devices:
        raise ConfigError("privacy.clip", f"does not cover all that {config.method_name} sends: {leak}")
    if config.run.selection in BY_LOSSES:
        problem = f"does not cover the losses that run.selection = {config.run.selection} asks for; use uniform"
        raise ConfigError("privacy.clip", problem)
    if config.run.evaluate_devices != "never":
        problem = 'does not cover scores of the devices; set run.evaluate_devices to "never"'
        raise ConfigError("privacy.clip", problem)


def _check_private_sum(config: Config) -> None:
    """The model depends on uploads only through a sum with weights that do not depend on samples."""
    name, sends = config.method_name, config.method_class.rule(config.method).sends
    beyond = config.method_class.beyond_sum(config.method)
    if sends:
        beyond = f"its devices send {', '.join(sends)} beside the model"
    if beyond is not None:
        problem = f"server does not protect {name}: {beyond}; use devices, or a method such as fedavg or fedbuff"
        raise ConfigError("privacy.where", problem)
    for key, value, off in (("defence.rule", config.defence.rule, "none"), ("run.gate", config.run.gate, "off")):
        if value != off:
            problem = f'judges uploads by their content, so noise on the sum cannot cover it; set it to "{off}"'
            raise ConfigError(key, problem)
    if config.links.up != "none":
        problem = (
            'cannot encode a model that is not finite, and noise on the sum cannot cover a rejection; set it to "none"'
        )
        raise ConfigError("links.up", f'{problem}; set it to "none"')


def check_layout(config: Config, layout: Layout) -> None:
    """Raise a ``ConfigError`` for a network with something that noise must not touch, or too large layers."""
    if config.privacy.on and layout.size != layout.learnable:
        problem = "does not cover running statistics of the network; choose one without, or set model.norm to group"
        raise ConfigError("privacy.clip", problem)
    if config.links.fresh == "layers":
        least, whole = smallest_budget(layout), 4 * layout.size
        if (config.links.budget or whole // 4) < least:
            problem = f"holds no layer of this model: the smallest needs {least} bytes, all of them {whole}; give more"
            raise ConfigError("links.budget", problem)


def check_deployable(config: Config) -> None:
    """Raise a ``ConfigError`` for what only the simulator can do."""
    if config.attack.kind != "none":
        raise ConfigError("attack.kind", "is for simulations; leave it at none")
