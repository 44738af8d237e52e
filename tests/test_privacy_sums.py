"""Privacy by a trusted server: clipped uploads, sums with noise, and what each device has spent."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet import Federation, LocalRule, privacy
from freshet.config import resolve
from freshet.core.about import About
from freshet.core.events import Aggregated, Contribution, Event, Noted
from freshet.core.layout import Layout
from freshet.core.messages import Merge, Upload
from freshet.core.method import Aggregate, Method, MethodContext, Mismatch, Options
from freshet.core.server import Server
from freshet.errors import ConfigError, RunError
from freshet.methods import class_and_preset, method_options
from freshet.methods._shared.rounds import RoundMethod
from freshet.privacy import (
    CLIP_NOTE,
    NOISE_NOTE,
    Accountant,
    NoisedSum,
    PrivacyOptions,
    SumAccount,
    SumAudit,
    describe,
)
from freshet.training.optimisers import constant

SIZE, CLIP, NOISE = 24, 0.5, 2.0
SAMPLES = [5, 20, 1, 7, 11, 3]
START = np.linspace(-2, 2, SIZE).astype(np.float32)
OPTIONS = PrivacyOptions(where="server", clip=CLIP, noise=NOISE)
#: Methods with their options. Buffers hold 4 uploads.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fednova": {},
    "fedopt": {},
    "fedacg": {},
    "fedbuff": {"K": 4, "beta": 0.5},
    "fadas": {"M": 4},
    "fedstaleweight": {"K": 4},
}
ROUNDS = ("fedavg", "fednova", "fedopt", "fedacg")


class Watched(NoisedSum):
    """Keeps the sums as they were before noise."""

    def __init__(self, noisy: bool = True, key: int = 0) -> None:
        super().__init__(OPTIONS, key)
        self.noisy, self.totals = noisy, list[np.ndarray]()

    def release(self, total: np.ndarray, parts: Any, version: int) -> np.ndarray:
        self.totals.append(total.copy())
        noised = super().release(total, parts, version)
        return noised if self.noisy else total


def server_of(name: str | type[Method], noise: NoisedSum, options: dict[str, Any] | None = None) -> Server:
    layout = Layout.build([("w", (SIZE,), "learnable")])
    context = MethodContext(len(SAMPLES), np.array(SAMPLES), 5, 4, layout, 0)
    kind = class_and_preset(name)[0] if isinstance(name, str) else name
    given = method_options(name, options or {}) if isinstance(name, str) else Options()
    return Server(kind(given, context), context, START.copy(), constant(0.1), gate=None, noise=noise)


def upload(server: Server, device: int, step: np.ndarray, steps: int = 5, **more: Any) -> list[Event]:
    active = server.active_trips[device]
    with np.errstate(over="ignore"):
        weights = (server.store.get(active.base) + step).astype(np.float32)
    return server.upload(Upload(device, active.trip, active.base, weights, steps, **more))


def direction(seed: int, length: float) -> np.ndarray:
    step = np.random.default_rng(seed).normal(size=SIZE)
    return step * (length / np.linalg.norm(step))


def first_sum(name: str, target: int, step: np.ndarray, noise: NoisedSum) -> tuple[Server, list[Event]]:
    """One aggregation. All devices send the same in every world but ``target``, which sends ``step`` each time.

    In a buffer the target is there twice, with a stale upload, since another aggregation comes before the second.
    """
    server = server_of(name, noise, METHODS[name])
    events: list[Event] = []
    if name in ROUNDS:
        server.trigger([0, 1, 2, 3])
        for device in range(4):
            sent = step if device == target else direction(device, 3.0)
            events += upload(server, device, sent, steps=5 + device)
        return server, events
    server.trigger([0, 1, 2, 3, 4, 5])
    for device in (0, 4, 5, 1 if target != 1 else 3):
        events += upload(server, device, direction(device, 3.0))
    del events[:]
    assert server.version == 2 and target in server.active_trips
    events += upload(server, target, step)
    for device in (target, 0, 4):
        server.trigger([device])
        events += upload(server, device, step if device == target else direction(10 + device, 0.1))
    return server, events


def notes(events: list[Event], about: str) -> list[dict[str, Any]]:
    return [dict(event.numbers) for event in events if isinstance(event, Noted) and event.about == about]


# ---- sensitivity


@pytest.mark.parametrize("name", METHODS)
def test_replacing_what_a_device_sends_moves_the_sum_by_at_most_the_bound(name: str) -> None:
    """And opposite long steps move it by exactly the bound: the noise is not larger than it must be."""
    target = 1 if name in ROUNDS else 2
    found = []
    for step in (
        direction(7, 100.0),
        -direction(7, 100.0),
        direction(8, 0.01),
        np.full(SIZE, np.nan),
        direction(9, 1e38),
    ):
        noise = Watched()
        _, events = first_sum(name, target, step, noise)
        (said,) = notes(events, NOISE_NOTE)
        found.append((noise.totals[-1], said))
        assert not [event for event in events if type(event).__name__ == "Rejected"]
    weight = dict(zip(found[0][1]["devices"], found[0][1]["weights"], strict=True))[target]
    assert all(said == found[0][1] for _, said in found), "weights and deviation do not depend on what is sent"
    gaps = [float(np.linalg.norm(a - b)) for a, _ in found for b, _ in found]
    assert max(gaps) <= 2 * CLIP * weight * (1 + 1e-9)
    assert np.linalg.norm(found[0][0] - found[1][0]) >= 0.999 * 2 * CLIP * weight


def test_weights_of_a_sum_are_those_of_the_method() -> None:
    """Samples in FedAvg; discounts over both uploads of a device that is in the buffer twice."""
    _, events = first_sum("fedavg", 1, direction(7, 1.0), Watched())
    (said,) = notes(events, NOISE_NOTE)
    assert said["weights"] == pytest.approx([n / 33 for n in (5, 20, 1, 7)])
    assert said["deviation"] == pytest.approx(NOISE * CLIP * 20 / 33)
    _, events = first_sum("fedbuff", 2, direction(7, 1.0), Watched())
    (said,) = notes(events, NOISE_NOTE)
    assert said["devices"] == [2, 0, 4]
    assert said["weights"] == pytest.approx([(2**-0.5 + 1) / 4, 1 / 4, 1 / 4])
    assert said["deviation"] == pytest.approx(NOISE * CLIP * (2**-0.5 + 1) / 4)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(1e-3, 1e6), st.floats(1e-3, 1e4))
def test_clipped_step_is_within_the_bound_in_spite_of_rounding(
    seed: int, clip: float, length: float, model: float
) -> None:
    rng = np.random.default_rng(seed)
    start, step = (rng.normal(size=300) * model).astype(np.float32), rng.normal(size=300)
    weights = (start + step * (length / np.linalg.norm(step))).astype(np.float32)
    noise = NoisedSum(PrivacyOptions(where="server", clip=clip), 0)
    found, note = noise.clip_upload(Upload(0, 1, 1, weights, 1), start)
    moved = found.weights.astype(np.float64) - start
    assert np.linalg.norm(moved) <= clip * (1 + 1e-12)
    whole = np.linalg.norm(weights.astype(np.float64) - start)
    if whole <= clip:
        assert found.weights is weights
    elif clip > 1e-4 * np.linalg.norm(start):
        assert np.linalg.norm(moved) >= 0.99 * clip and moved @ step > 0
    assert note.numbers["length"] == pytest.approx(whole)


def test_step_after_a_merge_is_clipped_from_its_anchor() -> None:
    """The server's own progress does not count, whatever the clip."""
    noise = Watched(noisy=False)
    server = server_of("fedbuff", noise, {"K": 1, "fresh": "rebase"})
    server.trigger([0, 1])
    upload(server, 1, direction(1, CLIP))
    active = server.active_trips[0]
    fresh = server.push(0, active.trip)
    assert np.linalg.norm(fresh.weights - START) > 0.4 * CLIP
    d = direction(2, 0.9 * CLIP)
    weights = (fresh.weights + d).astype(np.float32)
    merges = (Merge(fresh.version, {"n1": 1, "beta": 1.0}),)
    events = server.upload(Upload(0, active.trip, active.base, weights, 5, merges=merges))
    assert notes(events, CLIP_NOTE)[0]["share"] == 1.0
    np.testing.assert_allclose(-noise.totals[-1], 2**-0.5 * d, atol=1e-6)


# ---- the noise


def test_noise_has_the_stated_deviation_is_new_each_time_and_repeats_with_its_key() -> None:
    def draws(key: int) -> np.ndarray:
        noise, total = NoisedSum(OPTIONS, key), np.linspace(0, 1, 1000)
        parts = [Contribution(0, 1, 1, 0.25), Contribution(1, 1, 1, 0.75)]
        return np.stack([noise.release(total, parts, 1) - total for _ in range(50)])

    found = draws(3)
    assert found.std() == pytest.approx(NOISE * CLIP * 0.75, rel=0.02) and abs(found.mean()) < 0.02
    assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 0.15
    assert np.array_equal(found, draws(3)) and not np.array_equal(found, draws(4))


def test_round_moves_by_the_noised_sum_of_clipped_steps() -> None:
    """FedAvg, from the formula: w + sum p_k d'_k + z."""
    noise = Watched()
    server, events = first_sum("fedavg", 1, direction(7, 0.1), noise)
    steps = [direction(0, 3.0), direction(7, 0.1), direction(2, 3.0), direction(3, 3.0)]
    clipped = [d * min(1.0, CLIP / np.linalg.norm(d)) for d in steps]
    total = sum(n / 33 * d for n, d in zip((5, 20, 1, 7), clipped, strict=True))
    np.testing.assert_allclose(noise.totals[0], total, atol=1e-6)
    z = privacy.stream(0, "noised sum", 1).standard_normal(SIZE) * (NOISE * CLIP * 20 / 33)
    np.testing.assert_allclose(server.weights, START + total + z, atol=1e-5)
    assert [note["share"] for note in notes(events, CLIP_NOTE)] == pytest.approx([1 / 6, 1, 1 / 6, 1 / 6], rel=1e-4)


def test_optimiser_on_the_server_sees_only_the_noised_sum() -> None:
    """FedAdam's moments are those of the noised mean, not of the uploads."""
    noise = Watched()
    server, _ = first_sum("fedopt", 1, direction(7, 100.0), noise)
    o, state = server.method.options, server.method.state
    z = privacy.stream(0, "noised sum", 1).standard_normal(SIZE) * (NOISE * CLIP * 20 / 33)
    noised = noise.totals[0] + z
    np.testing.assert_allclose(state.m, (1 - o.beta1) * noised, atol=1e-6)
    np.testing.assert_allclose(state.v, o.beta2 * o.tau**2 + (1 - o.beta2) * noised**2, atol=1e-6)


def test_buffer_moves_by_the_noised_sum_and_its_momentum_too() -> None:
    noise = Watched()
    server, _ = first_sum("fedbuff", 2, direction(7, 1.0), noise)
    draws = [privacy.stream(0, "noised sum", k).standard_normal(SIZE) for k in (1, 2)]
    deviations = [NOISE * CLIP * 0.25, NOISE * CLIP * (2**-0.5 + 1) / 4]
    first, second = (t + s * z for t, s, z in zip(noise.totals, deviations, draws, strict=True))
    np.testing.assert_allclose(server.method.state.m, 0.5 * first + second, atol=1e-6)
    np.testing.assert_allclose(server.weights, START - first - (0.5 * first + second), atol=1e-5)


def test_clipping_alone_leaves_a_small_update_as_it_is() -> None:
    """Without noise and within C, the private path gives what the plain one gives."""
    for name in METHODS:
        plain, private = server_of(name, None, METHODS[name]), server_of(name, Watched(noisy=False), METHODS[name])
        for server in (plain, private):
            server.trigger([0, 1, 2, 3])
            for device in range(4):
                upload(server, device, direction(device, 0.3), steps=5 + device)
        assert plain.version == private.version == 2
        np.testing.assert_allclose(private.weights, plain.weights, atol=2e-6, err_msg=name)


# ---- the account


needs_library = pytest.mark.skipif(privacy.find_spec("dp_accounting") is None, reason="needs dp-accounting")


@needs_library
def test_epsilon_is_that_of_dp_accounting() -> None:
    """Seven aggregations with equal weights; then weights that differ, composed one by one."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    noise = NoisedSum(OPTIONS, 0)
    for _ in range(7):
        noise.release(np.zeros(3), [Contribution(device, 1, 1, 0.1) for device in range(10)], 1)
    found = Accountant(OPTIONS).summary_of_sums(noise.account)
    theirs = RdpAccountant().compose(dp_accounting.GaussianDpEvent(NOISE / 2), 7).get_epsilon(OPTIONS.delta)
    assert found["epsilon"] == pytest.approx(theirs, rel=1e-9) and found["uploads"] == 7
    noise.release(np.zeros(3), [Contribution(0, 1, 1, 0.2), Contribution(1, 1, 1, 0.6)], 2)
    noise.release(np.zeros(3), [Contribution(0, 1, 1, 0.5), Contribution(0, 1, 2, 0.3), Contribution(2, 1, 1, 0.1)], 3)
    theirs = RdpAccountant().compose(dp_accounting.GaussianDpEvent(NOISE / 2), 8)
    theirs = theirs.compose(dp_accounting.GaussianDpEvent(NOISE / 2 * 0.6 / 0.2))
    found = Accountant(OPTIONS).summary_of_sums(noise.account)
    assert found["by_device"]["0"] == pytest.approx(theirs.get_epsilon(OPTIONS.delta), rel=1e-9)
    assert found["device"] == 0 and found["spent"]["2"] == pytest.approx(7 + (0.1 / 0.8) ** 2)
    assert "device 0, 9 updates, against whoever sees models; the server is trusted" in describe(found)


@needs_library
def test_device_with_a_weight_of_0_spends_nothing() -> None:
    """FedStaleWeight gives such weights to devices that are never stale."""
    noise = NoisedSum(OPTIONS, 0)
    noise.release(np.zeros(3), [Contribution(0, 1, 1, 0.0), Contribution(1, 1, 1, 1.0)], 1)
    assert Accountant(OPTIONS).summary_of_sums(noise.account)["by_device"]["0"] == 0.0
    noise.release(np.zeros(3), [Contribution(2, 1, 1, 0.0)], 2)
    assert noise.account.spent == {0: 0.0, 1: 1.0, 2: 0.0}


@needs_library
def test_run_without_aggregations_costs_nothing() -> None:
    found = Accountant(OPTIONS).summary_of_sums(SumAccount("0"))
    assert (found["epsilon"], found["device"], found["spent"]) == (0.0, None, {})


def test_model_that_is_refused_for_its_noise_still_counts() -> None:
    huge = PrivacyOptions(where="server", clip=CLIP, noise=1e39)
    server = server_of("fedavg", NoisedSum(huge, 0))
    server.trigger([0, 1])
    events = upload(server, 0, direction(0, 1.0)) + upload(server, 1, direction(1, 1.0))
    assert server.version == 1 and [type(event).__name__ for event in events][-2:] == ["Rejected", "Noted"]
    assert server.noise.account.times == {0: 1, 1: 1}


def test_audit_recomputes_shares_deviation_and_cost() -> None:
    _, events = first_sum("fedbuff", 2, direction(7, 100.0), Watched())
    (said,), (step,) = notes(events, NOISE_NOTE), [event for event in events if isinstance(event, Aggregated)]
    clipped = notes(events, CLIP_NOTE)[0]

    def check(noise: dict[str, Any], clip: dict[str, Any]) -> SumAudit:
        made = SumAudit(OPTIONS)
        made.check_clip(clip)
        made.expect_note(step.version, step.contributions)
        made.check_noise(noise)
        return made

    spent = check(said, clipped).spent
    assert spent == pytest.approx({2: 1.0, 0: (1 / (1 + 2**-0.5)) ** 2, 4: (1 / (1 + 2**-0.5)) ** 2})
    for key, value in (("deviation", 0.1), ("weights", [0.1, 0.25, 0.25])):
        with pytest.raises(Mismatch, match=key[:6]):
            check(said | {key: value}, clipped)
    for key, value in (("share", 1.0), ("length", 0.1), ("bound", 2 * CLIP)):
        with pytest.raises(Mismatch, match=r"share|bound"):
            check(said, clipped | {key: value})
    silent = SumAudit(OPTIONS)
    silent.expect_note(1, step.contributions)
    with pytest.raises(Mismatch, match="without noise"):
        silent.expect_note(2, step.contributions)


def test_account_and_key_are_part_of_a_checkpoint() -> None:
    one, other = Watched(key=2**100 + 7), Watched(key=1)
    server, _ = first_sum("fedbuff", 2, direction(7, 1.0), one)
    resumed = server_of("fedbuff", other, METHODS["fedbuff"])
    resumed.restore(server.state())
    assert other.account == one.account
    for each in (server, resumed):
        each.trigger([0, 1, 2, 3])
        for device in range(4):
            upload(each, device, direction(device, 1.0))
    assert np.array_equal(server.weights, resumed.weights)


# ---- what noise on the sum does not cover


class Careless(Method):
    """Adds every upload as it is."""

    about = About("careless", "async", "Careless", "nobody")

    def receive(self, server: Server, upload: Upload, trip: Any) -> Aggregate:
        return Aggregate(upload.weights, [Contribution(upload.device, trip.base, server.staleness(trip), 1.0)])


def test_method_that_aggregates_past_the_noise_is_stopped() -> None:
    server = server_of(Careless, Watched())
    server.trigger([0])
    with pytest.raises(RunError, match=r"Careless aggregated without server.release\(\)"):
        upload(server, 0, direction(0, 0.1))


class Curious(RoundMethod):
    """A round of one's own. It looks at everything that it is given."""

    about = About("curious", "sync", "Curious", "nobody")

    def shares(self, members: list[Any]) -> list[float]:
        lengths = [1.0 + float(np.linalg.norm(m.weights - START)) for m in members]
        return [length / sum(lengths) for length in lengths]

    def aggregate(self, server: Server, members: list[Any], shares: list[float]) -> tuple[np.ndarray, dict[str, Any]]:
        assert all(np.array_equal(m.weights, members[0].weights) and not m.vectors for m in members)
        return members[-1].weights.copy(), {}


def test_round_of_ones_own_sees_nothing_but_the_noised_mean() -> None:
    assert Curious.beyond_sum(Options()) is None
    found = []
    for length in (0.01, 5.0):
        server = server_of(Curious, Watched(noisy=False))
        server.trigger([0, 1])
        upload(server, 0, direction(0, length))
        found += [e for e in upload(server, 1, direction(1, 0.2)) if isinstance(e, Aggregated)]
    assert [[part.weight for part in event.contributions] for event in found] == [[0.5, 0.5]] * 2

    class Listens(Curious):
        def receive(self, server: Server, upload: Upload, trip: Any) -> Any:
            return super().receive(server, upload, trip)

    assert Listens.beyond_sum(Options()) == "its own receive() sees single uploads"
    assert "does not say" in (Careless.beyond_sum(Options()) or "")


SERVER = {"where": "server", "clip": 1.0}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": {"name": "fedasync"}}, "privacy.where: server does not protect fedasync: it does not say that"),
        ({"method": {"name": "fedasmu"}}, "weights learned from them; set method.apply"),
        (
            {"method": {"name": "fedasmu", "apply": "progress", "dynamic_server": False}},
            "set method.merge to .rebase.; use devices",
        ),
        ({"method": {"name": "fedexp"}}, "the length of its step follows from the length of each update"),
        ({"method": {"name": "fedlws"}}, "it shrinks layers by the distance"),
        ({"method": {"name": "feddyn"}}, "devices keep sums of their own updates"),
        ({"method": {"name": "mifa"}}, "keeps each device's last update"),
        ({"method": {"name": "ca2fl"}}, "does not say"),
        ({"method": {"name": "port"}}, "does not say"),
        ({"method": {"name": "scaffold"}}, "its devices send change beside the model"),
        ({"method": {"name": "fedavg"}, "defence": {"rule": "clip"}}, "defence.rule: judges uploads by their content"),
        ({"method": {"name": "fedavg"}, "run": {"gate": 100.0}}, 'run.gate: judges .* set it to "off"'),
        ({"method": {"name": "fedavg"}, "links": {"up": "int8"}}, 'links.up: cannot encode .* set it to "none"'),
        ({"method": {"name": "fedavg"}, "run": {"selection": "oort"}}, "does not cover the losses"),
        ({"method": {"name": "fedavg"}, "run": {"evaluate_devices": "end"}}, "does not cover scores of the devices"),
    ],
)
def test_what_the_noise_does_not_cover_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"privacy": SERVER} | given)


def test_network_with_running_statistics_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not cover running statistics"):
        Federation(method="fedavg", model="resnet20", privacy=SERVER)


def test_clipping_takes_the_place_of_the_norm_gate() -> None:
    assert resolve({"method": {"name": "fedavg"}, "privacy": SERVER}).run.gate == "off"
    assert resolve({"method": {"name": "fedavg"}, "privacy": {"clip": 1.0}}).run.gate == 100.0
    assert resolve({"method": {"name": "fedavg"}, "privacy": {"where": "server"}}).run.gate == 100.0


def test_learned_slots_and_own_times_to_ask_are_covered() -> None:
    """Only the trusted server sees when a device asks. Noise on the device does not cover it."""
    learned = {"name": "fedasmu-fresh", "dynamic_server": False, "slot": "rl"}
    assert resolve({"method": learned, "privacy": SERVER}).method.slot == "rl"
    with pytest.raises(ConfigError, match="slots are learned from losses"):
        resolve({"method": learned, "privacy": {"clip": 1.0}})
    with pytest.raises(ConfigError, match="beta is learned from losses"):
        resolve({"method": learned | {"beta": "learned", "eta_gamma": 0.1}, "privacy": SERVER})


def test_deployment_has_a_key_that_devices_do_not_know() -> None:
    made = Federation(method="fedbuff", data={"name": "digits"}, privacy=SERVER, run={"seed": 3})
    simulated = made.assembly.server.noise
    assert isinstance(simulated, NoisedSum) and simulated.account.key == "3"
    deployed = [type(made.assembly)(made.config, deployed=True).server.noise for _ in range(2)]
    keys = {each.account.key for each in deployed if isinstance(each, NoisedSum)}
    assert len(keys) == 2 and all(len(key) > 20 for key in keys)


def test_a_rule_for_devices_may_ask_when_it_likes() -> None:
    class Asks(LocalRule):
        def plan(self, memory, assignment, rng):
            return None

    class Buffered(class_and_preset("fedbuff")[0]):
        @classmethod
        def rule(cls, options):
            return Asks()

    assert Buffered.beyond_sum(None) is None and Asks().leak() is not None
