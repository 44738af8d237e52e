"""A device: answers the server's messages by training on its own data, and keeps its memory in its own folder.

    app = Device(load=my_data).app(Path(__file__).with_name("federation.toml"))      # in a Flower client app

Each message has a process of its own, so state that must last is in the folder: the device's memory with its last
answer, and a trip that waits for the fresh model. Each is one file, replaced atomically. Its name contains the
session (one run of a server): a new session starts empty and deletes nothing, so no run learns from another's state.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from freshet import flower
from freshet.assembly import Assembly, Overrides
from freshet.config import CUSTOM, Config, load_tables, resolve
from freshet.core.compression import NotHeld, digest, receive
from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Fresh, Merge, Packed, Slot, Upload
from freshet.core.method import Memory
from freshet.core.streams import stream
from freshet.core.vectors import Vector
from freshet.data.adapters import without_loader
from freshet.data.archives import as_data_errors
from freshet.data.dataset import DataSet, check, own_data
from freshet.errors import ConfigError, DataError, FreshetError
from freshet.files import open_regular, replacing
from freshet.flower import IMPORTED_AT, OVER_FILE, wire
from freshet.flower.wire import MalformedMessage, from_bytes, to_bytes
from freshet.runs.checkpoint import Tree
from freshet.training.batches import FederatedData
from freshet.training.network import Factory
from freshet.training.own_loop import TrainingLoop
from freshet.training.task import takes_whole_batch
from freshet.training.trainer import Setup, Trainer
from freshet.training.trip import LocalTrip

if TYPE_CHECKING:
    from freshet.flower.fresh import FreshClient


#: A message from the server with a model.
Message = TypeVar("Message", Assignment, Fresh)
#: The number of latest sessions that a device keeps. It may take part in several at once.
KEPT_SESSIONS = 4


@dataclass
class DeviceRecord:
    """The device's memory, its last answer with the answer's ticket, and the weights that it holds.

    ``held`` is what the next compressed model refers to (``core/compression.py``). All are written together, so a trip
    counts once, also for the residual of its upload.
    """

    memory: Memory
    ticket: str = ""
    answer: Tree | None = None
    held: Vector | None = None


class DeviceFolder:
    """The folder of one device, accessible to its own user only."""

    def __init__(self, folder: Path, session: str) -> None:
        self.folder, self.session = folder, session
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user owns the folder; the files have mode 0600 anyway
            folder.chmod(0o700)  # Flower may have made it readable for all

    def read(self) -> DeviceRecord:
        """Read the record of this session. Empty if it is missing or unreadable."""
        tree = self._read("memory")
        if tree is None:
            return DeviceRecord({})
        try:
            return DeviceRecord(dict(tree["memory"]), tree["ticket"], tree["answer"], tree.get("held"))
        except (KeyError, TypeError, ValueError):
            return DeviceRecord({})

    def write(self, kept: DeviceRecord) -> None:
        """Replace the record of this session."""
        self._write("memory", dict(vars(kept)))

    def write_paused(self, ticket: str, trip: Tree) -> None:
        """Save a trip until the fresh model arrives."""
        self._write("paused", {"ticket": ticket, "trip": trip})

    def read_paused(self, ticket: str) -> Tree | None:
        """Read the paused trip with this ticket, or None if it is lost."""
        tree = self._read("paused")
        found: Any = None if tree is None or tree.get("ticket") != ticket else tree.get("trip")
        return found if isinstance(found, dict) else None

    def write_over(self) -> None:
        """Note that a run is over, for the process that keeps the SuperNode running."""
        with replacing(self.folder / OVER_FILE, 0o600) as file:
            file.write(self.session.encode(errors="replace"))

    def _file(self, kind: str) -> Path:
        """The file name contains a hash because the server chooses the session's name, which may be any text."""
        return self.folder / f"{kind}.{hashlib.sha256(self.session.encode()).hexdigest()[:16]}.safetensors"

    def _write(self, kind: str, tree: Tree) -> None:
        with replacing(self._file(kind), 0o600) as file:
            file.write(to_bytes({"session": self.session} | tree))
        self._remove_old(kind)

    def _remove_old(self, kind: str) -> None:
        """Remove the files of old sessions."""
        found = dict[Path, float]()
        for path in self.folder.glob(f"{kind}.*safetensors"):
            with contextlib.suppress(FileNotFoundError):  # a trip of another session removed it
                found[path] = path.stat().st_mtime
        for path in sorted(found, key=lambda each: found[each])[:-KEPT_SESSIONS]:
            path.unlink(missing_ok=True)

    def _read(self, kind: str) -> Tree | None:
        try:
            tree = from_bytes(self._file(kind).read_bytes())
        except (FileNotFoundError, MalformedMessage):
            return None
        return tree if tree.get("session") == self.session else None


_log = logging.getLogger(__name__)
NodeConfig = Mapping[str, Any]
#: Gives a device its training samples: ``(x, y)``, a torch Dataset, a Hugging Face Dataset, or a DataLoader of either,
#: whose ``collate_fn`` makes the batches.
Load = Callable[[NodeConfig], Any]
#: Seconds between two polls for a hurry of the server.
HURRY_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Sources:
    """A device's network and data. A device that brings its samples has no shards."""

    assembly: Assembly
    dataset: DataSet
    shards: list[NDArray[np.int64]] | None = None


class Device:
    """A device of a deployment. ``load`` and ``model`` replace the data set and network of the configuration.

    ``trainer`` is the training loop of a federation with one of its own. ``overrides`` makes all of them at once, as
    the server has them; the device then trains on its part of the samples.
    """

    def __init__(
        self,
        load: Load | None = None,
        model: Factory | None = None,
        trainer: TrainingLoop | None = None,
        overrides: Callable[[], Overrides] | None = None,
    ) -> None:
        self._load, self._model, self._loop, self._overrides = load, model, trainer, overrides
        self._prepared: dict[str, Sources] = {}

    def app(self, federation: str | Path) -> Any:
        """The Flower client app of this device."""
        from flwr.clientapp import ClientApp

        app: Any = ClientApp()
        app.train()(lambda message, context: self._on_message(Path(federation), message, context))
        app.prepare = lambda node: self.prepare(resolve(load_tables(Path(federation))), node)
        return app

    def prepare(self, config: Config, node: NodeConfig) -> None:
        """Load network and data once, for all later trips in this process and in its forks."""
        key = self._key(config, node)
        if key not in self._prepared:
            self._prepared[key] = self._sources(config, node)

    def _key(self, config: Config, node: NodeConfig) -> str:
        """What network and data depend on. Devices without samples of their own share the configuration's data set."""
        own = self._load is not None or node.get("data")
        kept = {name: value for name, value in node.items() if own or name not in ("partition-id", "folder")}
        return json.dumps([config.tables(), kept], sort_keys=True, default=str)

    def _on_message(self, federation: Path, message: Any, context: Any) -> Any:
        from flwr.app import Message

        node: NodeConfig = context.node_config
        answer = self.handle(wire.read_order(message.content), resolve(load_tables(federation)), node, context.node_id)
        return Message(wire.answer_record(answer), reply_to=message)

    def handle(
        self, order: wire.Order | wire.FreshDelivery | wire.RunOver, config: Config, node: NodeConfig, node_id: int
    ) -> wire.Answer:
        """Carry out the server's order. Under [privacy], not even the text of an error leaves the device."""
        if isinstance(order, wire.RunOver):
            DeviceFolder(device_folder(node, node_id), order.session).write_over()
            return wire.Answer(order.ticket, lost="the run is over")
        try:
            return self._handle(order, config, node, node_id)
        except Exception:
            if not config.privacy.on_devices:
                raise
            _log.exception("the trip failed")
            return wire.Answer(order.ticket, lost="the device's app failed")

    def _handle(
        self, order: wire.Order | wire.FreshDelivery, config: Config, node: NodeConfig, node_id: int
    ) -> wire.Answer:
        """The last answer is kept, so that it can be repeated without a second draw of noise."""
        began = time.time()
        folder = DeviceFolder(device_folder(node, node_id), order.session)
        record = folder.read()
        if record.ticket == order.ticket and record.answer is not None:
            return _repeat_answer(order.ticket, record.answer)
        paused = folder.read_paused(order.ticket) if isinstance(order, wire.FreshDelivery) else None
        if isinstance(order, wire.FreshDelivery) and paused is None:
            return wire.Answer(order.ticket, lost="the device no longer has this trip")
        worker = _Worker(self, config, node, order.ticket, folder, record, began)
        try:
            return worker.train(order) if isinstance(order, wire.Order) else worker.resume(order, paused or {})
        except NotHeld as problem:
            return wire.Answer(order.ticket, lost=str(problem))  # the server then sends the whole model

    def setup(self, config: Config, node: NodeConfig, device: int) -> Setup:
        """What this device trains with: the network, and its own shard of the data set or the samples it brings."""
        sources = self._prepared.get(self._key(config, node)) or self._sources(config, node)
        assembly, dataset, devices = sources.assembly, sources.dataset, config.fleet.devices
        shards = [np.empty(0, np.int64)] * devices
        if sources.shards is None:
            shards[device] = np.arange(len(dataset.y_train))
        else:
            place = node.get("partition-id", device)
            if type(place) is not int or not 0 <= place < devices:
                raise ConfigError("partition-id", f"must be a number from 0 to {devices - 1}, not {place!r}")
            shards[device] = sources.shards[place]
        return assembly.setup(FederatedData.of(dataset, shards), secret=True)

    def _sources(self, config: Config, node: NodeConfig) -> Sources:
        """Load the network, and the data set or the samples that this device brings."""
        load, model = self._load or _loader(str(node.get("data", ""))), self._model or _factory(node.get("model"))
        own = None if load is None else load(node)
        overrides = self._overrides() if self._overrides else Overrides()
        loop = self._loop or _named_trainer(node.get("trainer"))
        overrides = replace(overrides, factory=model or overrides.factory, trainer=loop or overrides.trainer)
        if own is not None and config.data.name == CUSTOM:  # the server's samples never leave the server
            whole = config.data.model_copy(update={"validation": 0.0, "train_samples": 0, "test_samples": 0})
            config = replace(config, data=whole)
            overrides = replace(overrides, dataset=own_samples_only(own, config))
        assembly = Assembly(config, overrides)
        assembly.check_network()
        if own is None:
            return Sources(assembly, assembly.dataset, assembly.shards)
        dataset = assembly.dataset if overrides.dataset is not None else with_samples(assembly.dataset, own, config)
        return Sources(assembly, dataset)


class _Worker:
    """The work for one message: a trainer, the memory and timing."""

    def __init__(
        self,
        device: Device,
        config: Config,
        node: NodeConfig,
        ticket: str,
        folder: DeviceFolder,
        record: DeviceRecord,
        began: float,
    ) -> None:
        self._device, self._config, self._node = device, config, node
        self._ticket, self._folder, self._memory, self._held = ticket, folder, record.memory, record.held
        self._rule = config.method_class.rule(config.method)
        self._unreached, self._samples = "", 0
        born = process_start()
        taken, ready = flower.TAKEN_AT or born, max(born, IMPORTED_AT)
        #: Seconds by phase, and by this machine's clock when the message was taken from the SuperNode.
        self._timing = {"began": taken, "start": ready - taken, "import": began - ready}

    def _trainer(self, number: int) -> Trainer:
        at = time.time()
        setup = self._device.setup(self._config, self._node, number)
        self._samples = len(setup.data.shards[number])
        trainer = setup.trainer()
        self._timing["load"] = time.time() - at
        return trainer

    def _reported_timing(self) -> dict[str, float]:
        """Seconds by phase, unless [privacy] forbids reporting them."""
        return {} if self._config.privacy.on_devices else self._timing

    def train(self, order: wire.Order) -> wire.Answer:
        """Train to the end, or up to a slot whose fresh model comes by message."""
        trainer, channel = self._trainer(order.assignment.device), order.channel
        assignment, at = self._decode(order.assignment, trainer.flat.layout), time.time()
        trip = trainer.begin(assignment, self._slots(order), self._rule, self._memory, order.seconds)
        with _HurryListener(channel, trip):
            return self._continue(trip, channel, order.seconds, at)

    def _decode(self, message: Message, layout: Layout) -> Message:
        """A message with its model. The device then holds this model. Raises ``NotHeld`` or another ``ValueError``."""
        links = self._config.links
        if message.packed is not None:
            weights = receive(message.packed, self._held, layout, links.keep)
            message = message._replace(weights=weights, packed=None)
        if links.tracks:
            self._held = message.weights[: layout.learnable].copy()
        return message

    def _slots(self, order: wire.Order) -> list[Slot]:
        """When to ask. For pushed models, the device looks at the start of every epoch but the first."""
        assignment, rule, kind = order.assignment, self._rule, order.channel.kind
        if not rule.asks or kind == "none":
            return []
        if rule.push_after:
            return [Slot(epoch, "push") for epoch in range(2, assignment.epochs + 1)]
        rng = stream(self._config.run.seed, "slot", assignment.device, assignment.trip)
        first = rule.plan(self._memory, assignment, rng)
        return [] if first is None else [first, *rule.later_slots(first, assignment.epochs)]

    def resume(self, delivery: wire.FreshDelivery, paused: Tree) -> wire.Answer:
        """Train on after the fresh model has arrived. One for an earlier slot is a repetition: ask again."""
        assignment = Assignment(**paused["assignment"])
        slots = [Slot(*slot) for slot in paused["slots"]]
        trainer, at = self._trainer(assignment.device), time.time()
        trip = trainer.begin(assignment, slots, self._rule, self._memory, paused["seconds"])
        trip.restore(paused["state"])
        self._held = paused.get("held")
        if delivery.slot != trip.asks_at.epoch:
            return wire.Answer(self._ticket, slot=trip.asks_at, samples=self._samples, timing=self._reported_timing())
        trip.merge(None if delivery.fresh is None else self._decode(delivery.fresh, trip.layout))
        return self._continue(trip, wire.FreshChannel("messages"), paused["seconds"], at)

    def _continue(self, trip: LocalTrip, channel: wire.FreshChannel, seconds: float | None, at: float) -> wire.Answer:
        """Train on from slot to slot. Pause where the fresh model comes by message."""

        def answer() -> bool:
            if channel.kind != "messages":
                self._ask(channel, trip)
            return channel.kind != "messages"

        if trip.advance(answer):
            return self._end(trip, trip.assignment, at)
        self._pause(trip, seconds)
        self._timing["train"] = time.time() - at
        slot, timing = trip.asks_at, self._reported_timing()
        return wire.Answer(self._ticket, slot=slot, samples=self._samples, timing=timing)

    def _pause(self, trip: LocalTrip, seconds: float | None) -> None:
        assignment = trip.assignment
        tree = {
            "assignment": assignment._asdict() | {"vectors": dict(assignment.vectors)},
            "held": self._held,
            "slots": [list(slot) for slot in trip.slots],
            "state": trip.save(),
            "seconds": seconds,
        }
        self._folder.write_paused(self._ticket, tree)

    def _ask(self, channel: wire.FreshChannel, trip: LocalTrip) -> None:
        """Request and merge the fresh model. If the service does not answer, train on without merging."""
        from freshet.flower.fresh import NoFreshAnswer

        at, client = time.time(), _client(channel, trip.assignment)
        try:
            fresh = client.ask(trip.asks_at, trip.newest, trip.layout.size)
            fresh = None if fresh is None else self._decode(fresh, trip.layout)
        except (NoFreshAnswer, ValueError) as problem:
            self._unreached = str(problem) or "no answer"
            _log.warning("training on without the fresh model: %s", problem)
            trip.continue_unanswered()
            return
        finally:
            client.close()
            self._timing["fresh"] = self._timing.get("fresh", 0.0) + time.time() - at
        trip.merge(fresh)

    def _end(self, trip: LocalTrip, assignment: Assignment, at: float) -> wire.Answer:
        """Finish the trip. Memory and answer are written together, so that a trip counts once."""
        outcome = trip.finish()
        self._timing["train"] = time.time() - at - self._timing.get("fresh", 0.0)
        self._timing["cpu"] = time.process_time()
        upload = outcome.upload(assignment)
        held = self._held if self._config.links.lasting else None
        answer = wire.Answer(
            self._ticket,
            upload,
            samples=self._samples,
            unreached=self._unreached,
            timing=self._reported_timing(),
            holds="" if held is None else digest(held),
        )
        self._folder.write(DeviceRecord(outcome.memory, self._ticket, _answer_tree(answer, upload), held))
        return answer


class _HurryListener:
    """Polls whether the server wants the upload soon, and tells the trip."""

    def __init__(self, channel: wire.FreshChannel, trip: LocalTrip) -> None:
        self._ended = threading.Event()
        self._channel, self._trip = channel, trip
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._channel.hurries:
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _listen(self) -> None:
        client = _client(self._channel, self._trip.assignment)
        while not self._ended.wait(HURRY_POLL_SECONDS):
            if client.is_urgent():
                self._trip.hurry()
                break
        client.close()


def _client(channel: wire.FreshChannel, assignment: Assignment) -> "FreshClient":
    from freshet.flower.fresh import FreshClient

    return FreshClient(channel.address, channel.certificate, assignment.device, assignment.trip, channel.token)


def _answer_tree(answer: wire.Answer, upload: Upload) -> Tree:
    up = upload._asdict() | {key: dict(getattr(upload, key)) for key in ("report", "vectors")}
    up["merges"] = [[merge.version, dict(merge.numbers)] for merge in upload.merges]
    up["packed"] = None if upload.packed is None else list(upload.packed)
    return {"upload": up, "samples": answer.samples, "unreached": answer.unreached, "holds": answer.holds}


def _repeat_answer(ticket: str, kept: Tree) -> wire.Answer:
    merges = tuple(Merge(version, numbers) for version, numbers in kept["upload"]["merges"])
    packed = kept["upload"]["packed"]
    upload = Upload(**kept["upload"] | {"merges": merges, "packed": None if packed is None else Packed(*packed)})
    return wire.Answer(
        ticket, upload, samples=kept["samples"], unreached=kept["unreached"], holds=kept.get("holds", "")
    )


def device_folder(node: NodeConfig, node_id: int) -> Path:
    """The folder of a device: from its node config, or named after its node id in the user's data folder."""
    path = node.get("folder")
    if isinstance(path, str) and path:
        return Path(path)
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "freshet" / "devices" / f"{node_id:x}"


def process_start() -> float:
    """The start time of this process if the system reports it, else now."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return time.time() - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


# ---- a device's own data and network


def check_sources(data: str, model: str, node: NodeConfig, federation: Path | None) -> list[str]:
    """Load a device's data and network as its trips will, before it connects. Returns what was found, one line each.

    Raises one sentence for a mistyped module, a missing file or samples that do not fit. ``federation`` is the file of
    settings, if this machine has it; otherwise the device gets it with its first trip.
    """
    load, factory = _loader(data), _factory(model)
    found = []
    if federation is not None:
        config, place = resolve(load_tables(federation)), node["partition-id"]
        count = len(Device().setup(config, dict(node) | {"data": data, "model": model}, place).data.shards[place])
        return [f"data: {count} samples", f"model: {model or config.model.name}"]
    if load is not None:
        try:
            x, y = _pairs(load(node))
        except FreshetError:
            raise
        except Exception as error:  # the user's own code
            raise ConfigError("--data", f"{data} fails ({type(error).__name__}: {str(error)[:160]})") from error
        if not len(y) or len(x) != len(y):
            raise ConfigError("--data", f"{data} gives {len(x)} samples and {len(y)} labels; give as many of both")
        shape = "" if isinstance(x[0], Mapping) else f" of shape {tuple(np.shape(x[0]))}"
        found.append(f"data: {len(y)} samples{shape}")
    if factory is not None:
        try:
            parameters = sum(each.numel() for each in factory().parameters())
        except Exception as error:  # the user's own code
            raise ConfigError("--model", f"{model} fails ({type(error).__name__}: {str(error)[:160]})") from error
        found.append(f"model: {parameters} parameters")
    return found


def _pairs(own: Any) -> tuple[Any, Any]:
    """Inputs and labels of what a loader returns, to count them."""
    if isinstance(own, tuple) and len(own) == 2:
        return own
    own, _ = without_loader(own)
    first = own[0] if len(own) else None
    return [first[0] if isinstance(first, tuple | list) else first] * len(own), range(len(own))


def _loader(text: str) -> Load | None:
    """The loader that ``--data`` names: none (the configuration's data set), ``module:function`` or a .npz file."""
    if not text:
        return None
    if text.endswith(".npz"):
        return lambda node: _read_npz(Path(text))
    load: Load = import_name("--data", text, "a .npz file with x and y, or module:function")
    return load


def _factory(text: object) -> Factory | None:
    """The factory that ``--model`` names: none (the configuration's network) or ``module:Class``."""
    factory: Factory | None = import_name("--model", str(text), "module:Class") if text else None
    return factory


def _named_trainer(text: object) -> TrainingLoop | None:
    """The training loop that ``--trainer`` names: none (the built-in loop) or ``module:function``."""
    loop: TrainingLoop | None = import_name("--trainer", str(text), "module:function") if text else None
    return loop


def import_name(option: str, text: str, wanted: str) -> Any:
    """What ``module:name`` names, or one sentence about the option that gave it."""
    module, colon, name = text.partition(":")
    if not (colon and module and name):
        raise ConfigError(option, f"must be {wanted}, but {text!r} was given")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(option, f"{text} cannot be loaded ({error})") from None


def _read_npz(path: Path) -> tuple[Any, Any]:
    with as_data_errors(path), open_regular(path) as file:
        arrays = np.load(file, allow_pickle=False)
        if not {"x", "y"} <= set(getattr(arrays, "files", ())):
            raise DataError(f"{path} has no arrays x and y; make it with: numpy.savez({path.name!r}, x=..., y=...)")
        return arrays["x"], arrays["y"]


def with_samples(dataset: DataSet, own: Any, config: Config) -> DataSet:
    """The configuration's data set with its training samples replaced by the device's own."""
    test = (dataset.x_test, dataset.y_test)
    found = own_data(CUSTOM, own, test, None, config.data)
    assert found is not None
    return check(replace(dataset, x_train=found.x_train, y_train=found.y_train, groups=None))


def own_samples_only(own: Any, config: Config) -> DataSet:
    """A data set of the device's own samples only, for a configuration that names none. They are not used for tests."""
    dataset = own_data(CUSTOM, own, own, None, config.data, whole=takes_whole_batch(config.training.task))
    assert dataset is not None
    if dataset.mean is not None:
        problem = "gives uint8 images, which would be scaled by the statistics of this device alone; give float32"
        raise ConfigError("--data", problem)
    return dataset
