"""The newer rivals: comparison with naive twins, the test vectors of their specification, and limiting cases."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshet.core.layout import Layout
from freshet.core.method import MethodContext
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, method_options
from freshet.methods.fedat import tiers_of
from freshet.methods.mifa import stale_step
from freshet.training.optimisers import constant
from tests.methods.helpers import (
    LAYOUT,
    LEARNABLE,
    MODELS,
    TWIN_LAYOUT,
    UNEQUAL,
    Device,
    arrivals,
    close,
    column,
    fedavg,
    fly,
    hold_round,
    logged,
    regression_weights,
    same,
    send,
    server_of,
    upload_of,
    vector,
)
from tests.twins import rivals as twins

LR = 0.1  # of every server in the laboratory
SAMPLES = dict(enumerate(UNEQUAL))
EQUAL = [10] * 8
A, B = 0, 1

# ---- numbers of one coordinate: the test vectors

ONE = Layout.build([("w", (1,), "learnable")])


def at(value: float) -> Vector:
    return np.array([value], np.float32)


def scalar_server(
    name: str,
    w: float = 0.0,
    samples: list[int] | None = None,
    in_flight: int = 0,
    epochs: int = 1,
    seconds: list[float] | None = None,
    **options: Any,
) -> Server:
    """A server of a model with one weight."""
    method, counts = class_and_preset(name)[0], np.array(samples or [10, 10], np.int64)
    expected = None if seconds is None else np.array(seconds)
    context = MethodContext(
        len(counts), counts, epochs, len(counts), ONE, seed=3, in_flight=in_flight, seconds=expected
    )
    return Server(method(method_options(name, options), context), context, at(w), constant(1.0), gate=None)


def value(server: Server) -> float:
    return float(server.weights[0])


def test_vector_of_ace() -> None:
    """w = 0, (A, b0, U = 2), (B, b0, U = -4), (A, b1, U = 1)."""
    for name, expected, counts in (("ace", [-0.5, 0.0, 0.75], [1, 2, 2]), ("aced", [-1.0, -0.5, -1.0], [1, 2, 1])):
        server = scalar_server(name, eta=0.5, tau_algo=0.5)  # tau_algo = 1 of M = 2 devices
        server.trigger([A, B])
        found, cached = [], []
        for device, U in ((A, 2.0), (B, -4.0), (A, 1.0)):
            start = server.store.get(server.active_trips[device].base)
            (event,) = send(server, device, start - np.float32(U))
            found.append(value(server))
            cached.append(event["cached"])
            if len(found) == 1:
                server.trigger([A])
        assert found == pytest.approx(expected, abs=1e-7)
        assert cached == counts


def test_aced_takes_no_buffers_of_an_update_that_is_too_old() -> None:
    """Its step is along the others' updates alone, so neither its statistics nor its counters count."""
    server = server_of("aced", tau_algo=0.25)  # at most 2 versions old
    server.trigger([7])
    for device in (0, 1, 2):
        fly(server, device, vector(10 + device))
    before = server.weights
    (event,) = send(server, 7, vector(50) + np.float32(100.0))
    assert (event["cached"], column(event, "weight")) == (2, [0.0])
    assert not np.array_equal(server.weights[:LEARNABLE], before[:LEARNABLE])
    same(server.weights[LEARNABLE:], before[LEARNABLE:])


def test_rate_of_ace_is_shared_by_the_devices_in_flight() -> None:
    moved = []
    for C in (1, 4):
        server = scalar_server("ace", in_flight=C)
        fly(server, A, at(1.0))
        moved.append(value(server))
    assert moved == [0.5, 0.125]


def test_vector_of_asyncfeded() -> None:
    options = {"lambda_": 1.0, "eps": 1.0, "gamma_bar": 2.0, "kappa": 1.0, "E_max": 9}
    server = scalar_server("asyncfeded", epochs=3, **options)
    server.trigger([A, B])
    rows = [send(server, A, at(1.0))[0]]
    assert value(server) == 1.0
    assert server.trigger([A])[0].epochs == 5
    rows += send(server, A, at(1.5))
    assert value(server) == 1.5
    assert server.trigger([A])[0].epochs == 7
    rows += send(server, B, at(-1.0))
    assert value(server) == pytest.approx(1.1, abs=1e-6)
    assert server.trigger([B])[0].epochs == 3
    close([row["gamma"] for row in rows], [0.0, 0.0, 1.5], 1e-12)
    close([row["alpha"] for row in rows], [1.0, 1.0, 0.4], 1e-12)


def test_asyncfeded_changes_nothing_for_an_upload_without_progress() -> None:
    server = scalar_server("asyncfeded", w=2.0, epochs=3, kappa=1.0)
    fly(server, A, at(2.0))
    assert (value(server), server.version, server.trigger([A])[0].epochs) == (2.0, 2, 3)


@pytest.mark.parametrize(("gamma_bar", "kappa", "epochs"), [(0.1, 50.0, 1), (50.0, 50.0, 6)])
def test_asyncfeded_clips_epochs(gamma_bar: float, kappa: float, epochs: int) -> None:
    server = scalar_server("asyncfeded", epochs=3, gamma_bar=gamma_bar, kappa=kappa, lambda_=1.0)
    server.trigger([A, B])
    send(server, A, at(1.0))
    send(server, B, at(0.5))  # gamma = 2
    assert server.trigger([B])[0].epochs == epochs


def test_vector_of_fedfa() -> None:
    server, found = scalar_server("fedfa", K=2), []
    server.trigger([A, B])
    for device, u in ((A, 1.0), (B, 3.0), (A, -1.0)):
        send(server, device, at(u))
        found.append(value(server))
        if len(found) == 1:
            server.trigger([A])
    assert found == [0.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("plus_one", "expected", "p"),
    [(False, 0.5833333, [1 / 6, 1 / 6, 2 / 3]), (True, 0.7291667, [2.5 / 12, 2.5 / 12, 7 / 12])],
)
def test_vector_of_fedstaleweight(plus_one: bool, expected: float, p: list[float]) -> None:
    """v = 2, w = 1, K = 3; (A, b1, 1), (A, b2, 0.5), (B, b0, -1)."""
    server = scalar_server("fedstaleweight", w=1.0, K=3, plus_one=plus_one)
    server.trigger([B])
    server.store.advance(at(1.0))
    server.trigger([A])
    server.store.advance(at(1.0))
    send(server, A, at(2.0))
    server.trigger([A])
    send(server, A, at(1.5))
    (event,) = send(server, B, at(0.0))
    assert event["sigma"] == [0.5, 0.5, 2.0]
    close(column(event, "weight"), p, 1e-12)
    assert value(server) == pytest.approx(expected, abs=1e-6)


def test_window_of_fedstaleweight_loses_its_oldest_value() -> None:
    server = scalar_server("fedstaleweight", K=1, W=2)
    sigmas = []
    for wait in (3, 1, 0):
        server.trigger([A])
        for _ in range(wait):
            server.store.advance(server.weights)
        sigmas.append(send(server, A, at(0.0))[0]["sigma"])
    assert sigmas == [[3.0], [2.0], [0.5]]


def test_vector_of_fedat() -> None:
    """A is in the fast tier, B in the slow one; u = 1 (A), 2 (A), -1 (B)."""
    server, found = scalar_server("fedat", seconds=[5.0, 9.0], G=2, K=1, lambda_=0.0), []
    for device, u in ((A, 1.0), (A, 2.0), (B, -1.0)):
        fly(server, device, at(u))
        found.append(value(server))
    assert found == pytest.approx([1 / 3, 0.5, 0.2], abs=1e-7)


def test_tiers_of_fedat_have_equally_many_devices_by_seconds() -> None:
    seconds = dict(enumerate([7.0, 1.0, 3.0, 9.0, 3.0]))
    assert [tiers_of(seconds, 5)[device] for device in seconds] == [3, 0, 1, 4, 2]
    assert [tiers_of(seconds, 2)[device] for device in seconds] == [1, 0, 0, 1, 0]
    assert tiers_of({3: 1.0}, 5) == {3: 0}


def test_fedat_sorts_a_large_fleet_once() -> None:
    """Sorting it once for each device took 6 s with 3,000 devices."""
    began = time.process_time()
    server = scalar_server("fedat", samples=[1] * 20_000, seconds=[float(k % 7) for k in range(20_000)])
    assert time.process_time() - began < 10.0
    assert [server.method._expected[device] for device in (0, 7, 6, 13)] == [0, 0, 4, 4]


def test_fedat_measures_trips_where_no_seconds_are_expected() -> None:
    """As in a deployment: B takes 9 seconds and A 5, so B is in the slow tier as soon as A was heard."""
    server, tiers = scalar_server("fedat", G=2, K=1), []
    for device, started, now in ((A, 0.0, 5.0), (B, 0.0, 9.0), (A, 9.0, 14.0)):
        server.trigger([device], started)
        server.now = now
        tiers.append(send(server, device, at(1.0))[0]["tier"])
    assert tiers == [1, 2, 1]


def send_vector(server: Server, device: int, weights: Vector, steps: int = 1, **vectors: Vector) -> list[Any]:
    return logged(server.upload(upload_of(server, device, weights, steps, vectors=vectors)))


def test_vector_of_fedac() -> None:
    """v = 2, w = 1, w^1 = 0.5, w^0 = 0, K = 3; (A, b1, 1), (A, b2, 0.5), (B, b0, -1)."""
    server = scalar_server("fedac", w=0.0, K=3, eta_g=0.1)
    server.trigger([B])
    server.store.advance(at(0.5))
    server.trigger([A])
    server.store.advance(at(1.0))
    send_vector(server, A, at(1.5), change=at(0.0))
    server.trigger([A])
    send_vector(server, A, at(1.5), change=at(2.1))
    (event,) = send_vector(server, B, at(-1.0), change=at(0.0))
    assert event["r"] == [1.0, 1.0, 0.1]
    assert event["G_norm"] == pytest.approx(0.6666667, abs=1e-7)
    assert value(server) == pytest.approx(1.2023858, abs=1e-6)
    assert float(server.method.state.c[0]) == pytest.approx(1.0)  # p = 1 / 2.1


def test_device_of_fedac_adopts_its_control_when_its_upload_has_come() -> None:
    """Used or waiting: otherwise two changes in one buffer would both count from the same old control."""
    server, heard = scalar_server("fedac", K=2), []
    for _ in range(4):
        heard.append(server.trigger([A])[0].instruction["heard"])
        send_vector(server, A, at(0.1), change=at(0.0))
    assert heard == [0, 1, 2, 3]


def test_vector_of_masfl() -> None:
    server, found = scalar_server("masfl", beta=0.5, gamma=0.1), []
    for device, mean in ((A, 2.0), (B, -4.0), (A, 1.0)):
        server.trigger([device])
        send_vector(server, device, server.weights, gradient=at(mean))
        state = server.method.state
        found += [float(state.g[0]), float(state.c[0]), value(server)]
    close(found, [1.0, 1.0, -0.1, -1.0, -1.0, 0.0, -1.5, -1.5, 0.15], 1e-7)


def test_adamasfl_steps_by_progress_per_step() -> None:
    server = scalar_server("adamasfl", gamma=0.5)
    server.trigger([A])
    send_vector(server, A, at(3.0), steps=6, gradient=at(9.0))
    assert value(server) == 0.25  # 0.5 * 3 / (lr 1 * 6)


@pytest.mark.parametrize("name", ["masfl", "adamasfl"])
def test_device_of_masfl_matches_the_twin(name: str) -> None:
    method, options = class_and_preset(name)[0], method_options(name, {"beta": 0.7})
    device, w, direction = Device(lr=0.2), regression_weights(3), regression_weights(4)
    outcome = device.train(method.rule(options), w, vectors={"direction": direction})
    given = (device.x, device.y, device.batches(), 0.2, 0.7, name == "adamasfl")
    u, mean = twins.masfl_local(w, direction, *given)
    close(outcome.weights, u, 1e-5)
    close(outcome.vectors["gradient"], mean, 1e-5)


def test_vector_of_fedexp() -> None:
    server = scalar_server("fedexp")
    event = hold_round(server, {A: at(1.0), B: at(-0.5)})
    assert event["alpha"] == pytest.approx(4.8449612, abs=1e-7)
    assert value(server) == pytest.approx(1.2112403, abs=1e-6)
    same(server.method.evaluation_model(server), server.weights)
    hold_round(server, {A: server.weights + np.float32(1.0)})
    assert value(server) == pytest.approx(2.2112403, abs=1e-6)
    assert float(server.method.evaluation_model(server)[0]) == pytest.approx(1.7112403, abs=1e-6)


def test_epsilon_of_fedexp_falls_with_the_square_of_the_local_rate() -> None:
    server = scalar_server("fedexp", eps=0.1)
    server.schedule = lambda rounds: 0.5**rounds
    eps = [hold_round(server, {A: at(1.0), B: at(-0.5)})["eps_t"] for _ in range(3)]
    close(eps, [0.1, 0.025, 0.00625], 1e-12)


@pytest.mark.parametrize("name", ["fedexp", "mifa"])
def test_a_learning_rate_of_zero_that_a_method_divides_by_gives_one_sentence(name: str) -> None:
    """A schedule of the user's own may warm up from 0."""
    server = scalar_server(name)
    server.schedule = float
    with pytest.raises(ConfigError, match=r"^training\.schedule: .*learning rate"):
        hold_round(server, {A: at(0.0), B: at(0.0)})


@pytest.mark.parametrize(("name", "moved"), [("masfl", -0.1), ("adamasfl", 0.0)])
def test_masfl_takes_the_gradient_of_a_trip_without_progress(name: str, moved: float) -> None:
    """With a learning rate of 0 the model comes back as it was, and the mean gradient is as good as any."""
    server = scalar_server(name, beta=0.5, gamma=0.1)
    server.schedule = float
    server.trigger([A])
    send_vector(server, A, server.weights, gradient=at(2.0))
    assert (value(server), float(server.method.state.g[0])) == pytest.approx((moved, 1.0))


def test_vector_of_fedacg() -> None:
    server = scalar_server("fedacg", beta=0.0)
    hold_round(server, {A: at(1.0), B: at(-0.5)})
    assert float(server.method.evaluation_model(server)[0]) == pytest.approx(0.25)
    assert value(server) == pytest.approx(0.4625, abs=1e-7)
    hold_round(server, {A: at(1.0)})
    assert float(server.method.state.m[0]) == pytest.approx(0.75, abs=1e-7)
    assert float(server.method.evaluation_model(server)[0]) == pytest.approx(1.0)


def test_fedacg_pulls_devices_by_twice_beta() -> None:
    """The gradient of beta |u - w|^2 is 2 beta (u - w)."""
    assert class_and_preset("fedacg")[0].rule(method_options("fedacg", {"beta": 0.03})).rho == 0.06


def test_vector_of_mifa() -> None:
    server = scalar_server("mifa")
    hold_round(server, {A: at(1.0), B: at(-0.5)})
    assert value(server) == pytest.approx(0.25)
    hold_round(server, {A: at(2.0)})
    assert value(server) == pytest.approx(0.875)


def test_vector_of_fedstale() -> None:
    """p = (1, 0.5), beta = 0.5, equal samples: 0, then A alone with Delta = 0.5."""
    step = lambda shares, updates, cached, total: float(  # noqa: E731
        stale_step(0.5, shares, [np.array([u]) for u in updates], cached, np.array([total]))[0]
    )
    assert step([0.5, 1.0], [1.0, -0.5], [None, None], 0.0) == 0.0
    assert step([0.5], [0.5], [at(1.0)], 0.5 * 1.0 + 0.5 * -0.5) == 0.125


def test_mifa_scales_old_updates_by_the_rate_of_the_round() -> None:
    """An update of a round with rate 1 counts half in a round with rate 0.5."""
    server = scalar_server("mifa")
    server.schedule = lambda rounds: 0.5**rounds
    hold_round(server, {A: at(1.0), B: at(1.0)})
    assert value(server) == 1.0
    hold_round(server, {A: server.weights})
    assert value(server) == 1.25


# ---- twins


def asynchronous(name: str, twin: Callable[..., Any], given: dict[str, Any], theirs: dict[str, Any] | None = None):
    def make() -> tuple[Server, Any]:
        server = server_of(name, epochs=3, **given)
        return server, twin(vector(1), **(given if theirs is None else theirs), **TWIN_LAYOUT)

    return make


ED = {"lambda_": 0.5, "eps": 0.7, "gamma_bar": 1.5, "kappa": 2.0}


def fedat() -> tuple[Server, Any]:
    """Eight devices in three tiers, the highest numbers fastest."""
    counts, seconds = np.array(UNEQUAL, np.int64), np.arange(8.0, 0.0, -1.0)
    context = MethodContext(8, counts, 1, 4, LAYOUT, seed=3, seconds=seconds)
    method = class_and_preset("fedat")[0](method_options("fedat", {"G": 3, "K": 2}), context)
    tiers = {7: 1, 6: 1, 5: 1, 4: 2, 3: 2, 2: 2, 1: 3, 0: 3}
    twin = twins.FedATTwin(vector(1), tiers=tiers, G=3, K=2, n=SAMPLES, **TWIN_LAYOUT)
    return Server(method, context, vector(1), constant(LR), gate=None), twin


AC = {"K": 3, "eta_g": 0.02, "beta1": 0.7, "beta2": 0.8}
MAS = {"S": 2, "beta": 0.6, "gamma": 0.05}
ARRIVALS: dict[str, Callable[[], tuple[Server, Any]]] = {
    "ace": asynchronous("ace", twins.ACETwin, {"eta": 0.4}, {"eta": 0.4, "M": 8}),
    "aced": asynchronous("aced", twins.ACETwin, {"eta": 0.4, "tau_algo": 0.25}, {"eta": 0.4, "M": 8, "tau_algo": 2}),
    "asyncfeded": asynchronous("asyncfeded", twins.AsyncFedEDTwin, ED, {**ED, "E": 3, "E_max": 6}),
    "fedfa": asynchronous("fedfa", twins.FedFaTwin, {"K": 4}),
    "fedstaleweight": asynchronous("fedstaleweight", twins.FedStaleWeightTwin, {"K": 3, "W": 2}),
    "fedstaleweight plus one": asynchronous("fedstaleweight", twins.FedStaleWeightTwin, {"K": 3, "plus_one": True}),
    "fedat": fedat,
    "fedac": asynchronous("fedac", twins.FedACTwin, AC),
    "masfl": asynchronous("masfl", twins.MasFLTwin, MAS, {**MAS, "M": 8, "lr": LR}),
    "adamasfl": asynchronous("adamasfl", twins.MasFLTwin, MAS, {**MAS, "M": 8, "lr": LR, "normalised": True}),
}
LOGGED = ("cached", "gamma", "next_epochs", "queued", "sigma", "r", "tier", "T")


@pytest.mark.parametrize("case", ARRIVALS)
def test_asynchronous_servers_match_the_twins(case: str) -> None:
    (server, twin), rng = ARRIVALS[case](), np.random.default_rng(5)
    taus, count = set(), 0
    for _ in range(300):
        idle = [d for d in range(8) if d not in server.active_trips]
        if idle and (rng.random() < 0.5 or not server.active_trips):
            device = int(rng.choice(idle))
            (assignment,) = server.trigger([device])
            assert assignment.version == twin.trigger(device)
            if hasattr(twin, "epochs"):
                assert assignment.epochs == twin.epochs(device)
            if hasattr(twin, "direction"):
                close(assignment.vectors["direction"], twin.direction(device), 1e-6)
            if "c" in assignment.vectors:
                close(assignment.vectors["c"], twin.c, 1e-6)
            continue
        device = int(rng.choice([d for d in server.active_trips if d != 7 or rng.random() < 0.1] or [7]))
        if rng.random() < 0.1:
            server.drop_trip(device, server.active_trips[device].trip, "gone")
            twin.lose(device)
            continue
        u = vector(int(rng.integers(1 << 30)))
        u[:LEARNABLE] = server.weights[:LEARNABLE] + 0.3 * u[:LEARNABLE]
        steps, vectors = int(rng.integers(1, 9)), {}
        for name in server.rule.sends:
            vectors[name] = rng.standard_normal(LEARNABLE).astype(np.float32)
        more = {**vectors, **({"steps": steps} if "gradient" in vectors else {})}
        events = logged(server.upload(upload_of(server, device, u, steps, vectors=vectors)))
        result = twin.upload(device, u, **more)
        events = [event for event in events if event["kind"] == "aggregate"]
        assert len(events) == (result is not None)
        for event in events:
            assert (column(event, "device"), column(event, "base")) == (result["devices"], result["base"])
            assert [s - 1 for s in column(event, "staleness")] == result["staleness"]
            close(column(event, "weight"), result["weights"], 1e-9)
            for key in LOGGED:
                if key in result:
                    close(event[key], result[key], 1e-6)
            taus.add(max(result["staleness"]))
            count += 1
        close(server.weights, twin.w, 2e-6)
    assert count > 15
    assert min(taus) <= 1 < max(taus)


def rounds_of(name: str, twin: Callable[..., Any], given: dict[str, Any], theirs: dict[str, Any] | None = None):
    def make() -> tuple[Server, Any]:
        server = server_of(name, samples=UNEQUAL, **given)
        return server, twin(vector(1), **(given if theirs is None else theirs), **TWIN_LAYOUT)

    return make


CACHE = {"n": SAMPLES, "lr": LR}
HALF = dict.fromkeys(range(8), 0.5)  # 4 of 8 devices take part in a round
ROUNDS: dict[str, Callable[[], tuple[Server, Any]]] = {
    "fedexp": rounds_of("fedexp", twins.FedExPTwin, {"eps": 0.2}),
    "fedacg": rounds_of("fedacg", twins.FedACGTwin, {"lambda_": 0.7}),
    "mifa": rounds_of("mifa", twins.MIFATwin, {}, CACHE),
    "fedstale": rounds_of("fedstale", twins.MIFATwin, {"beta": 0.3}, {**CACHE, "beta": 0.3, "p": HALF}),
    "fedvarp": rounds_of("fedvarp", twins.MIFATwin, {}, {**CACHE, "beta": 1.0, "p": HALF}),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_synchronous_servers_match_the_twins(case: str) -> None:
    (server, twin), rng = ROUNDS[case](), np.random.default_rng(6)
    for number in range(12):
        members = [int(d) for d in rng.choice(8, size=4, replace=False)]
        gone = members if number == 5 else members[:1] if number == 7 else []
        uploads: dict[int, Vector] = {}
        server.trigger(sorted(members))
        events: list[Any] = []
        for device in members:
            if device in gone:
                events = logged(server.drop_trip(device, server.active_trips[device].trip, "gone"))
                continue
            u = uploads[device] = vector(int(rng.integers(1 << 30)))
            u[:LEARNABLE] = server.weights[:LEARNABLE] + 0.3 * u[:LEARNABLE]
            events = logged(server.upload(upload_of(server, device, u)))
        result, event = twin.aggregate(uploads, SAMPLES), events[-1]
        assert (event["version"], column(event, "device")) == (result["version"], result["devices"])
        close(column(event, "weight"), result["weights"], 1e-12)
        if "alpha" in result:
            close(event["alpha"], result["alpha"], 1e-9)
        close(server.weights, twin.w, 1e-6)
        if hasattr(twin, "tested"):
            close(server.method.evaluation_model(server), twin.tested, 1e-6)


# ---- limits


def rounds(name: str, samples: list[int], **options: Any) -> Vector:
    server = server_of(name, samples=samples, **options)
    for shift in (0, 40):
        hold_round(server, {device: vector(shift + device) for device in range(len(samples))})
    return server.weights


def test_ace_of_one_device_adds_its_progress() -> None:
    server = server_of("ace", devices=1)
    close(arrivals(server, {0: vector(50)})[: LAYOUT.floats], vector(50)[: LAYOUT.floats], 1e-6)


def test_aced_with_a_large_tau_is_ace_once_everybody_is_cached() -> None:
    results = []
    for options in ({"name": "ace"}, {"name": "aced", "tau_algo": 1e6}):
        server = server_of(devices=4, **options)
        arrivals(server, dict.fromkeys(range(4), server.weights))
        arrivals(server, MODELS)
        results.append(server.weights)
    close(*results, 1e-6)


def test_asyncfeded_takes_a_fresh_model_if_lambda_is_eps() -> None:
    server = server_of("asyncfeded", lambda_=2.0, eps=2.0, kappa=0.0)
    close(arrivals(server, {3: vector(50)})[: LAYOUT.floats], vector(50)[: LAYOUT.floats], 1e-6)


def test_fedfa_of_one_place_takes_every_model() -> None:
    server = server_of("fedfa", K=1)
    for device in MODELS:
        fly(server, device, MODELS[device])
        same(server.weights, MODELS[device])


def test_fedstaleweight_with_equal_staleness_is_fedbuff_without_discount() -> None:
    results = []
    for name, options in (("fedstaleweight", {}), ("fedbuff", {"exponent": 0.0})):
        server = server_of(name, K=4, **options)
        arrivals(server, {device: vector(70 + device) for device in range(4)})
        server.trigger([0, 1, 2, 3])
        server.store.advance(vector(4))
        for device in range(4):
            send(server, device, MODELS[device])
        results.append(server.weights)
    close(*results, 1e-6)


def test_fedexp_with_a_large_epsilon_is_fedavg() -> None:
    close(rounds("fedexp", UNEQUAL, eps=1e9), rounds("fedavg", UNEQUAL), 1e-6)


def test_fedacg_without_momentum_is_fedavg_of_equal_devices() -> None:
    close(rounds("fedacg", EQUAL, lambda_=0.0, beta=0.0), rounds("fedavg", EQUAL), 1e-6)


@pytest.mark.parametrize("name", ["mifa", "fedstale", "fedvarp"])
def test_mifa_of_everybody_is_fedavg_of_equal_devices(name: str) -> None:
    samples = [10] * 4  # all of them take part in each round
    close(rounds(name, samples), rounds("fedavg", samples), 1e-6)


def test_fedstale_without_memory_is_unbiased_fedavg() -> None:
    """Four of eight devices with equal samples: alpha / p = 1/4."""
    server = server_of("fedstale", beta=0.0)
    hold_round(server, MODELS)
    close(server.weights, fedavg(MODELS, EQUAL), 1e-6)


def test_fedat_with_one_tier_is_fedavg_of_a_buffer() -> None:
    server = server_of("fedat", samples=UNEQUAL, G=1, K=4, lambda_=0.0)
    close(arrivals(server, MODELS), fedavg(MODELS, UNEQUAL), 1e-6)


def test_fedac_without_memory_takes_the_sign() -> None:
    server = server_of("fedac", K=4, beta1=0.0, beta2=0.0, eta_g=0.25)
    w = server.weights
    moved = arrivals(server, MODELS)[:LEARNABLE] - w[:LEARNABLE]
    close(moved, 0.25 * np.sign(fedavg(MODELS, EQUAL)[:LEARNABLE] - w[:LEARNABLE]), 1e-5)


def test_masfl_without_momentum_corrects_as_scaffold() -> None:
    """beta = 1: the device adds c - c_k to its gradient, and the server steps along ``c + mean(gbar - c_k)``."""
    server, rng = server_of("masfl", beta=1.0, gamma=0.1), np.random.default_rng(2)
    for device in (0, 1, 0):
        server.trigger([device])
        gradient = rng.standard_normal(LEARNABLE).astype(np.float32)
        state, w = server.method.state, server.weights
        step = state.c + gradient - state.c_k.get(device, 0.0)
        send_vector(server, device, w, gradient=gradient)
        close(server.weights[:LEARNABLE], w[:LEARNABLE] - 0.1 * step, 1e-6)
    state = server.method.state
    (assignment,) = server.trigger([1])
    close(assignment.vectors["direction"], state.c - state.c_k[1], 1e-6)
