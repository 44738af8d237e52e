"""A network without processes: devices answer when a test says so. Every message is encoded as in a deployment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freshet.assembly import Assembly
from freshet.config import Config, resolve
from freshet.core.coordinator import Coordinator
from freshet.flower import wire
from freshet.flower.device import Device
from freshet.flower.driver import LiveDriver, NetworkSettings, Reply
from freshet.flower.security import Tokens
from freshet.methods import class_and_preset
from freshet.runs import checkpoint
from freshet.runs.writer import RunWriter
from freshet.training.task import Score

TOKENS = Tokens(b"k" * 32)


class FakeTransport:
    """Keeps sent messages. ``put`` delivers an answer to one of them."""

    def __init__(self, nodes: set[int]) -> None:
        self.there, self.sent, self.ready = nodes, dict[str, tuple[int, Any]](), list[Reply]()
        self.everything: list[Any] = []

    def nodes(self) -> set[int]:
        return set(self.there)

    def send(self, node: int, content: Any, seconds: float) -> str:
        number = f"m{len(self.everything)}"
        self.everything.append(content)
        self.sent[number] = (node, content)
        return number

    def receive(self, messages: list[str]) -> list[Reply]:
        taken = [reply for reply in self.ready if reply.message in messages]
        self.ready = [reply for reply in self.ready if reply.message not in messages]
        return taken

    def put(self, number: str, content: Any = None, error: str = "") -> None:
        self.sent.pop(number)
        self.ready.append(Reply(number, content, error))
        self.everything.append(content)


class FakeFederation:
    """A server and its devices in one process, driven step by step."""

    def __init__(
        self,
        folder: Path,
        method: str | dict[str, Any] = "fedasmu",
        devices: int = 3,
        fresh: str = "side",
        wait_for: int = 1,
        training: Mapping[str, Any] | None = None,
        links: Mapping[str, Any] | None = None,
        privacy: Mapping[str, Any] | None = None,
        **run: Any,
    ) -> None:
        training = {"epochs": 2, "batch_size": 32} | dict(training or {})
        given = {"name": method} if isinstance(method, str) else method
        name = str(given["name"])
        options = {"K": 2} if name in ("port", "fedbuff") else {}
        tables = {"method": given | options, "fleet": {"devices": devices}, "training": training}
        tables |= {"data": {"train_samples": 200, "test_samples": 100}, "links": dict(links or {})}
        tables |= {"privacy": dict(privacy or {})}
        kind = {"trigger": "concurrency"} if class_and_preset(name)[0].about.kind != "sync" else {}
        config = resolve(tables | {"run": {"until": 1000.0, "period": 1.0} | kind | run})
        self.assembly = Assembly(config, deployed=True).check().begin()
        self.config: Config = self.assembly.config
        self.folder, self.fresh, self.wait_for = folder, fresh, wait_for
        self.transport = FakeTransport({100 + device for device in range(devices)})
        self.live = self.build(RunWriter.create(folder / "run", self.config.tables()))
        self.device = Device()

    def build(self, writer: RunWriter) -> LiveDriver:
        server = self.assembly.begin().server
        coordinator = Coordinator(server, self.config.trigger(), self.config.run.rounds)
        nodes = {100 + device: device for device in range(self.config.fleet.devices)}
        network = NetworkSettings(
            self.fresh, "127.0.0.1:1", "", poll=0.0, patience=5.0, wait_for=self.wait_for, node_poll=0.0
        )
        score = lambda weights: Score({"accuracy": 0.5}, 1.0)  # noqa: E731
        return LiveDriver(coordinator, self.transport, writer, score, TOKENS, network, nodes=nodes, eval_every=1e6)

    def save(self) -> None:
        """Write a checkpoint, as the run's lifecycle does."""
        tree = self.live.state() | {"wall_seconds": 0.0}
        checkpoint.write(self.folder / "run", tree)
        self.live.writer.record_checkpoint(tree["log"]["events"])

    def restart(self) -> dict[str, Any]:
        """Start another server from the last checkpoint and the journal. Messages are gone. Returns the checkpoint."""
        self.live.writer.lock.release()
        self.transport.sent.clear()
        self.transport.ready.clear()
        tree: dict[str, Any] = checkpoint.read(self.folder / "run").tree
        self.live = self.build(RunWriter(self.folder / "run", resume=tree["log"]))
        self.live.restore(tree, 1e6)
        return tree

    def step(self) -> None:
        """Run one turn of the driver's loop."""
        turns = iter([False, True])
        self.live.run(1e6, lambda: next(turns))

    def answer(self, number: str) -> wire.Answer:
        """The answer of an honest device to a message. It has no service, so it trains without merging."""
        node, content = self.transport.sent[number]
        order = wire.read_order(content)
        place = {"folder": str(self.folder / f"memory{node}")}
        if isinstance(order, wire.Order) and order.channel.kind == "side":
            order = wire.Order(order.assignment, order.session, order.ticket, wire.FreshChannel("none"))
        return self.device.handle(order, self.config, place, node)

    def train(self) -> None:
        """Let every device with a message answer."""
        for number in list(self.transport.sent):
            self.transport.put(number, wire.answer_record(self.answer(number)))

    def events(self, kind: str) -> list[dict[str, Any]]:
        import json

        self.live.writer.flush()
        lines = (self.folder / "run" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]
