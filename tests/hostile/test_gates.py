"""Random and hostile uploads and requests against the coordinator, for every method.

Whatever is sent, the model stays finite and sane, versions are counted right, every rejection is logged with a reason
and leaves no trace, held models are freed, nothing raises, and honest devices continue unaffected.
``make fuzz`` tries 100,000 sequences.
"""

import json
import os
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from freshet.core import events, saving
from freshet.core.admission import GATE_FACTOR
from freshet.core.coordinator import Coordinator, Effects
from freshet.core.events import OWN_KEYS, Aggregated, Event, Merged, Refused, Rejected, Triggered, Uploaded
from freshet.core.messages import Merge, Request, Slot, Upload
from freshet.core.scheduling import Trigger
from freshet.core.server import NO_TRIP
from freshet.methods import registry
from freshet.runs.audit import _check_line, _Replay
from tests.methods.helpers import LEARNABLE, REPORTS, SIZE, server_of, vector
from tests.methods.test_refused_aggregation import same

TRIES = int(os.environ.get("FRESHET_FUZZ", "1"))
#: Sequences for each method.
SEQUENCES = 20 if TRIES == 1 else 150 * TRIES
ACTIONS, DEVICES, EPOCHS = 40, 8, 3
#: Honest devices move no weight further than this.
SANE = 1e4
LARGEST = float(np.finfo(np.float32).max)
SMALL: dict[str, dict[str, Any]] = {
    "fedbuff": {"K": 3},
    "port": {"K": 2},
    "ca2fl": {"M": 3},
    "fadas": {"M": 3},
    "fedac": {"K": 3},
    "fedat": {"K": 2, "G": 2},
    "fedfa": {"K": 3},
    "fedstaleweight": {"K": 3},
}
#: Trips that get several fresh models.
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "fedasmu, refresh": ("fedasmu", {"refresh": "every"}),
    "fedasmu, push": ("fedasmu", {"push_after": 1, "slot": "never"}),
    "fedssmu, refresh": ("fedssmu", {"refresh": 2}),
}


class Fuzz:
    """One federation under attack."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.options = SEVERAL.get(name, (name, SMALL.get(name, {})))
        self.rng, self.now = np.random.default_rng(seed), 0.0
        self.deadline = float(self.rng.choice([0.0, 12.0]))
        self.c = self.coordinator()
        self.replay, self.seq, self.aggregations = _Replay(), 0, 0
        self.past: list[Upload] = []

    def coordinator(self) -> Coordinator:
        server = server_of(self.name, devices=DEVICES, epochs=EPOCHS, norm_gate=GATE_FACTOR, **self.options)
        kind = "rounds" if server.synchronous else "concurrency"
        return Coordinator(server, Trigger(kind, 3, 10.0, 4), deadline=self.deadline)

    # ---- honest

    def tick(self) -> None:
        there = self.rng.random(DEVICES) < 0.9
        free = set(range(DEVICES)) - self.c.server.active_trips.keys() - self.c.server.away.keys()
        effects = self.c.tick(self.now, lambda device: bool(there[device]))
        triggered = [event.device for event in effects.events if isinstance(event, Triggered)]
        assert len(set(triggered)) == len(triggered) and set(triggered) <= free, "no device is triggered twice at once"
        self.took(effects)

    def honest(self, device: int) -> Upload:
        """What an honest device in flight sends."""
        server, active, rng = self.c.server, self.c.server.active_trips[device], self.rng
        numbers = [{"beta": 0.4, "n1": n1} for n1 in (1, 2, 2)]
        merges = tuple(Merge(sent.version, n) for sent, n in zip(active.sent, numbers, strict=False))
        merges = merges if server.rule.asks else ()
        report: dict[str, float] = dict(REPORTS.get(self.name, {}))
        if server.rule.asks and active.slot is not None:
            report |= {"reward": float(rng.normal()), "slot": active.slot, "first": int(rng.integers(2))}
        vectors = {n: (0.1 * rng.standard_normal(LEARNABLE)).astype(np.float32) for n in server.rule.sends}
        upload = Upload(device, active.trip, active.base, server.weights, 3, report, merges, vectors)
        fresh = {sent.version: server.store.get(sent.version) for sent in active.sent}
        anchor = upload.anchor(server.store.get(active.base), fresh)
        return upload._replace(weights=(anchor + 0.01 * rng.standard_normal(SIZE)).astype(np.float32))

    def upload(self) -> None:
        flying = sorted(self.c.server.active_trips)
        if flying:
            upload = self.honest(int(self.rng.choice(flying)))
            effects = self.arrive(upload)
            assert not any(isinstance(e, Rejected) and e.device == upload.device for e in effects.events)
            self.past.append(upload)

    def ask(self) -> None:
        flying = sorted(self.c.server.active_trips)
        if flying:
            device = int(self.rng.choice(flying))
            active = self.c.server.active_trips[device]
            if self.c.server.rule.push_after and self.rng.random() < 0.5:
                self.took(self.c.push(device, active.trip))
                return
            again = self.rng.random() < 0.5
            epoch = (active.slot if again else None) or int(self.rng.integers(1, active.epochs + 1))
            self.took(self.c.request(Request(device, active.trip, Slot(epoch, "meta"))))

    def lose(self) -> None:
        flying = sorted(self.c.server.active_trips)
        if flying:
            device = int(self.rng.choice(flying))
            self.took(self.c.trip_lost(self.now, device, self.c.server.active_trips[device].trip, "gone"))

    def resume(self) -> None:
        """The server is restarted from a checkpoint."""
        other = self.coordinator()
        other.restore(deepcopy(self.c.state()))
        self.c = other

    # ---- hostile

    def attack(self) -> None:
        flying = sorted(self.c.server.active_trips)
        if not flying:
            self.elsewhere()
            return
        device = int(self.rng.choice(flying))
        if self.c.server.slots_allowed(EPOCHS) > 1 and self.rng.random() < 0.5:
            self.send_several(device, flying)
        active, upload = self.c.server.active_trips[device], self.spoilt(self.honest(device))
        before = deepcopy(saving.dump(self.c.server.method.state))
        effects = self.c.upload_arrived(self.now, device, active.trip, lambda: upload)
        refused = [event for event in effects.events if isinstance(event, Rejected)]
        assert refused and refused[0].device == device and len(refused[0].reason) > 5
        decided = any(isinstance(event, Aggregated) for event in effects.events)
        if not decided and self.name not in ("port", "fedcompass"):  # their lists of devices in flight are shorter now
            after = saving.dump(self.c.server.method.state)
            assert same(after, before), "a rejected upload has left a trace"
        self.took(effects)

    def send_several(self, device: int, flying: list[int]) -> None:
        """The device asks once more after each upload of the others."""
        trip = self.c.server.active_trips[device].trip
        for epoch, other in enumerate((each for each in flying if each != device), start=1):
            self.now += 0.01
            self.arrive(self.honest(other))
            if epoch <= EPOCHS and device in self.c.server.active_trips:
                self.now += 0.01
                self.took(self.c.request(Request(device, trip, Slot(epoch, "again"))))
        self.now += 0.01

    def spoilt(self, good: Upload) -> Any:
        """An upload with one invalid part."""
        rng, sends = self.rng, self.c.server.rule.sends
        wild = [np.nan, np.inf, -np.inf, LARGEST, -LARGEST, 1e30, -1e30, 1e9]
        weights = good.weights.copy()
        weights[int(rng.integers(SIZE)) if rng.random() < 0.5 else slice(None)] = wild[int(rng.integers(len(wild)))]
        number = [float("nan"), float("inf"), 10**400, "1", None, [1], {}][int(rng.integers(7))]
        other = int(rng.integers(-1, 99))
        spoilt: list[Any] = [
            good._replace(weights=weights),
            good._replace(weights=good.weights[:-1]),
            good._replace(weights=np.append(good.weights, np.float32(0))),
            good._replace(weights=good.weights.astype(np.float64)),
            good._replace(weights=good.weights.astype(np.float16)),
            good._replace(weights=np.repeat(good.weights, 2)[::2]),
            good._replace(weights=good.weights[None]),
            good._replace(weights=[None, 3, "w", [1.0], good.weights.tolist(), np.float32(1)][int(rng.integers(6))]),
            good._replace(base=good.base + int(rng.choice([-1, 1, 100]))),
            good._replace(base=[None, "1", [1], 10**30, np.ones(3)][int(rng.integers(5))]),
            good._replace(device=other if other != good.device else 77),
            good._replace(trip=good.trip + 1),
            good._replace(steps=[0, -1, None, 10**30, 2**52, "5", 2.0, True][int(rng.integers(8))]),
            good._replace(report={**good.report, "x": number}),
            good._replace(report=[None, 3, [1.0], "x"][int(rng.integers(4))]),
            good._replace(report={**good.report, (1, 2): 1.0}),
            good._replace(report={str(place): 1.0 for place in range(1000)}),
            *(good._replace(merges=self.one_of(wrong)) for wrong in self.wrong_merges(good).values()),
            good._replace(vectors={**good.vectors, "unasked": good.weights}),
            good._replace(vectors=[None, 3, [good.weights]][int(rng.integers(3))]),
            [None, 3, "upload", good.weights, tuple(good), Request(good.device, good.trip, Slot(1, "q"))][
                int(rng.integers(6))
            ],
        ]
        if sends:
            part = good.vectors[sends[0]].copy()
            part[int(rng.integers(LEARNABLE))] = wild[int(rng.integers(len(wild)))]
            spoilt += [good._replace(vectors={sends[0]: part}), good._replace(vectors={})]
        if self.c.server.rule.asks:
            spoilt += [
                *(good._replace(merges=self.one_of(wrong)) for wrong in self.impossible_merges(good).values()),
                good._replace(report={"reward": float(rng.choice([1e300, 1.0])), "slot": 99, "first": 1}),
                good._replace(
                    report={"reward": 1e200, "slot": self.c.server.active_trips[good.device].slot, "first": 1}
                ),
            ]
        return spoilt[int(rng.integers(len(spoilt)))]

    def one_of(self, choices: list[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def wrong_merges(self, good: Upload) -> dict[str, list[Any]]:
        """Merges that no method accepts, by what is wrong."""
        sent = [each.version for each in self.c.server.active_trips[good.device].sent]
        true = [Merge(version, {"beta": 0.4, "n1": 1}) for version in sent] or [Merge(good.base + 1, {"beta": 0.4})]
        one, last = true[0], true[-1]
        unsent = [v for v in (good.base, -1, 0, last.version + 1, 10**30) if v not in sent]
        strange = [True, float(one.version), str(one.version), None, [one.version], np.int64(one.version), np.ones(2)]
        numbers = [float("nan"), float("inf"), -float("inf"), 10**400, "1", None, [1], {}, np.ones(2)]
        lists = [None, 3, [1.0], "", [], {}, {"beta": 0.4}, {"kind": 1.0}, [one], one, {one.version: one.numbers}]
        wrong: dict[str, list[Any]] = {
            "no tuple": [*lists, frozenset(), iter(true), np.ones(2)],
            "no merge": [(each,) for each in (None, 3, 1.0, "x", tuple(one), one._asdict(), one.numbers, good)],
            "no version": [(one._replace(version=version),) for version in strange],
            "unsent version": [(one._replace(version=version),) for version in unsent],
            "unsent version after those sent": [(*true, one._replace(version=version)) for version in unsent],
            "the same version twice": [(one, one), (*true, last), (one, *true)],
            "reserved key": [
                (one._replace(numbers={**one.numbers, key: 1}),) for key in sorted(OWN_KEYS[Merged] - {"numbers"})
            ],
            "number": [
                (one._replace(numbers={**one.numbers, key: x}),) for x in numbers for key in ("beta", "n1", "x")
            ],
            "name": [(one._replace(numbers={**one.numbers, key: 1.0}),) for key in ((1, 2), 3, None, "x" * 1000)],
            "no numbers": [(one._replace(numbers=each),) for each in (None, 3, [1.0], "x", [("beta", 0.4)])],
            "too many numbers": [(one._replace(numbers={str(place): 1.0 for place in range(1000)}),)],
        }
        if len(sent) > 1:
            wrong["wrong order"] = [tuple(true[::-1]), (last, one)]
            wrong["one that is wrong among others"] = [
                (*true[:-1], last._replace(numbers={"beta": float("nan")})),
                (one._replace(numbers={"kind": 1}), *true[1:]),
                (*true[:-1], last._replace(version=last.version + 1)),
            ]
        return wrong

    def impossible_merges(self, good: Upload) -> dict[str, list[Any]]:
        """Merges whose numbers cannot be those of FedASMU."""
        sent = [each.version for each in self.c.server.active_trips[good.device].sent] or [good.base + 1]
        steps = good.steps
        impossible: dict[str, list[Any]] = {
            "beta": [(Merge(sent[-1], {"beta": beta, "n1": 1}),) for beta in (-1.0, -1e-9, 1.0, 1.1, 1e30)],
            "n1": [(Merge(sent[-1], {"beta": 0.3, "n1": n1}),) for n1 in (-1, steps, 99, 0.5, 1.0, 10**15)],
            "no n1": [(Merge(sent[-1], {"beta": 0.3}),)],
        }
        if len(sent) > 1:
            sound = {"beta": 0.3, "n1": 1}
            first, last = sent[0], sent[-1]
            impossible["a later one"] = [
                (Merge(first, sound), Merge(last, sound | each))
                for each in ({"beta": -1.0}, {"beta": 1.0}, {"n1": -1}, {"n1": steps}, {"n1": 0})
            ]
            impossible["an earlier one"] = [
                (Merge(first, sound | each), Merge(last, sound)) for each in ({"beta": 1.0}, {"n1": -1}, {"n1": 2})
            ]
        return impossible

    def elsewhere(self) -> None:
        """An upload for a trip that does not exist: never triggered, over, or in the future."""
        server, rng = self.c.server, self.rng
        idle = [device for device in range(DEVICES) if device not in server.active_trips]
        claims: list[tuple[Any, Any]] = [(device, server.trips.get(device, 0)) for device in idle]
        claims += [(device, active.trip + 1) for device, active in server.active_trips.items()]
        claims += [(99, 1), (-1, 1), (None, None), ("0", 1), ([], 1), (10**30, 1), (0.0, 1), (True, 1)]
        device, trip = claims[int(rng.integers(len(claims)))]
        sent = Upload(device, trip, 1, vector(3), 1)
        self.refused(self.c.upload_arrived(self.now, device, trip, lambda: sent))
        self.c.trip_lost(self.now, device, trip, "gone")

    def again(self) -> None:
        """A processed upload arrives again."""
        if self.past:
            old = self.past[int(self.rng.integers(len(self.past)))]
            active = self.c.server.active_trip(old.device, old.trip)
            if active is None:
                self.refused(self.arrive(old, took=False))

    def ask_wrongly(self) -> None:
        rng, server = self.rng, self.c.server
        flying = sorted(server.active_trips)
        device = int(rng.choice(flying)) if flying else 3
        trip = server.active_trips[device].trip if flying else 1
        slot = Slot(1, "meta")
        asked: list[Any] = [
            Request(device, trip + 1, slot),
            Request(device, 0, slot),
            Request(77, 1, slot),
            Request([], 1, slot),
            Request(None, None, slot),
            *(
                Request(device, trip, Slot(epoch, "q"))
                for epoch in (0, -1, 99, None, "1", 1.0, True, 10**30, np.ones(2))
            ),
            *(Request(device, trip, Slot(1, by)) for by in (None, 3, "x" * 1000, ["q"])),
            *(Request(device, trip, wrong) for wrong in (None, 1, (1, "q"), "slot")),
            *(None, 3, (device, trip, slot), "request"),
        ]
        before = [(active.slot, deepcopy(active.sent)) for active in server.active_trips.values()]
        self.refused(self.c.request(asked[int(rng.integers(len(asked)))]))
        assert [(active.slot, active.sent) for active in server.active_trips.values()] == before

    # ---- invariants

    def refused(self, effects: Effects) -> None:
        """One rejection with a reason, and an unchanged model."""
        (event,) = effects.events
        assert isinstance(event, Refused | Rejected) and len(event.reason) > 5 and effects.fresh is None
        self.took(effects)

    def arrive(self, upload: Upload, took: bool = True) -> Effects:
        effects = self.c.upload_arrived(self.now, upload.device, upload.trip, lambda: upload)
        if took:
            self.took(effects)
        return effects

    def took(self, effects: Effects) -> None:
        """The events can be logged and parsed, and the counts are right."""
        for event in effects.events:
            self.seq += 1
            line = json.loads(json.dumps({"seq": self.seq, "time": self.now, **events.record(event)}, allow_nan=False))
            assert type(_check_line(self.replay, line)) is type(event)
            self.aggregations += isinstance(event, Aggregated)
        self.holds(effects.events)

    def holds(self, happened: Any) -> None:
        server = self.c.server
        assert np.isfinite(server.weights).all() and np.abs(server.weights[:LEARNABLE]).max() < SANE
        given = server.method.evaluation_model(server)
        assert np.isfinite(given).all() and np.abs(given[:LEARNABLE]).max() < SANE
        assert server.version == 1 + self.aggregations == 1 + self.c.counts.aggregations
        holds: dict[int, int] = {server.version: 0}
        for active in server.active_trips.values():
            versions = [active.base, *(sent.version for sent in active.sent)]
            assert versions == sorted(set(versions)) and versions[-1] <= server.version, "each is newer than the last"
            assert len(active.sent) <= server.slots_allowed(active.epochs)
            for version in versions:
                holds[version] = holds.get(version, 0) + 1
        assert {version: holders for version, _, holders in server.store.items()} == holds, "held versions are freed"
        assert not server.active_trips.keys() & server.away.keys()
        assert all(isinstance(event, tuple) for event in happened)

    def run(self) -> None:
        actions = [self.tick, self.upload, self.ask, self.lose, self.resume]
        attacks = [self.attack, self.elsewhere, self.again, self.ask_wrongly]
        weights = np.array([4.0, 8.0, 3.0, 1.0, 0.5, 6.0, 2.0, 2.0, 3.0])
        chosen = self.rng.choice(len(weights), ACTIONS, p=weights / weights.sum())
        self.tick()
        for place in chosen:
            self.now += float(self.rng.exponential(2.0)) + 1e-3
            [*actions, *attacks][place]()
        self.calm()

    def calm(self) -> None:
        """After the attack, honest devices are heard and training continues."""
        server, version = self.c.server, self.c.server.version
        for device in list(server.away):
            self.c.trip_lost(self.now, device, server.away[device], "gone")
        for _ in range(6):
            self.now += 1.0
            self.tick()
            while server.active_trips:
                self.now += 0.5
                self.upload()
        assert server.version > version and not server.active_trips


@pytest.mark.parametrize("name", [*sorted(registry()), "fedasmu-course", "fedssmu-course", "fedasmu-fresh", *SEVERAL])
def test_whatever_is_sent_the_model_stays_sane_and_honest_devices_continue(name: str) -> None:
    for seed in range(SEQUENCES):
        try:
            Fuzz(name, seed).run()
        except BaseException as error:
            error.add_note(f"sequence {seed} of {name}")
            raise


def test_a_late_upload_is_told_so() -> None:
    fuzz = Fuzz("fedavg", 0)
    fuzz.c.deadline.seconds = 5.0
    fuzz.tick()
    device, *_ = fuzz.c.server.active_trips
    late = fuzz.honest(device)
    fuzz.now = 5.0
    fuzz.tick()
    assert device in fuzz.c.server.away
    effects = fuzz.c.upload_arrived(6.0, device, late.trip, lambda: late)
    happened: list[Event] = list(effects.events)
    assert happened == [Rejected(NO_TRIP, device, late.trip)] and device not in fuzz.c.server.away


def asked(name: str, models: int) -> tuple[Fuzz, Upload]:
    """A federation in which a device in flight was sent this many fresh models, and the upload of this device."""
    fuzz = Fuzz(name, 0)
    fuzz.c.deadline.seconds = 0.0
    server = fuzz.c.server
    (trip, *_) = server.trigger([0, 1, 2, 3])
    for place in range(models):
        fuzz.arrive(fuzz.honest(1 + place), took=False)
        assert fuzz.c.request(Request(0, trip.trip, Slot(1 + place, "meta"))).fresh is not None
    assert len(server.active_trips[0].sent) == models
    return fuzz, fuzz.honest(0)


@pytest.mark.parametrize("models", [0, 1, 2])
@pytest.mark.parametrize("name", ["fedasmu, refresh", "fedssmu, refresh"])
def test_every_malformed_list_of_merges_is_rejected_and_changes_nothing(name: str, models: int) -> None:
    fuzz, good = asked(name, models)
    wrong = fuzz.wrong_merges(good) | fuzz.impossible_merges(good)
    assert len(good.merges) == models and len(wrong) >= (18 if models > 1 else 14)
    server, kept = fuzz.c.server, fuzz.c.state()
    for kind, cases in wrong.items():
        for case, merges in enumerate(cases):
            fuzz.c.restore(deepcopy(kept))
            before = server.weights.tobytes(), server.version, deepcopy(saving.dump(server.method.state))
            merged, upload = fuzz.c.counts.merges, good._replace(merges=merges)
            effects = fuzz.c.upload_arrived(9.0, 0, good.trip, lambda upload=upload: upload)
            (first, *others) = [event for event in effects.events if not isinstance(event, Uploaded)]
            assert isinstance(first, Rejected) and first.device == 0 and not others, (kind, case)
            assert "merge" in first.reason or first.reason.startswith("report has something"), (kind, case)
            after = server.weights.tobytes(), server.version, saving.dump(server.method.state)
            assert after[:2] == before[:2] and same(after[2], before[2]), (kind, case)
            assert fuzz.c.counts.merges == merged and 0 not in server.active_trips, (kind, case)
    fuzz.c.restore(kept)
    happened = fuzz.c.upload_arrived(9.0, 0, good.trip, lambda: good).events
    assert sum(isinstance(event, Merged) for event in happened) == models, "what an honest device sends is accepted"
    assert any(isinstance(event, Aggregated) for event in happened)
