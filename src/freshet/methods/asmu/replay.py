"""Replay FedASMU's logged decisions against the formulas, from the log and the configuration alone."""

from typing import Any

from freshet.core.about import Kind
from freshet.core.events import (
    Aggregated,
    Discarded,
    Event,
    Lost,
    Merged,
    Numbers,
    Pushed,
    Rejected,
    Requested,
    Triggered,
)
from freshet.core.method import Mismatch, expect
from freshet.methods.asmu.staleness import (
    Control,
    PastUpload,
    control_gradients,
    cosine,
    descend,
    freshness_weight,
    gradient_step,
    merge_gradients,
    saturate,
    staleness_weight,
    training_scale,
)


def audit_event(options: Any, event: Event, memory: dict[Any, Any], kind: Kind) -> None:
    """Check every alpha and beta of FedASMU and FedSSMU, and each control's whole history."""
    if isinstance(event, Triggered):
        memory.pop(("asked", event.device), None)
        memory["epochs", event.device] = event.epochs
        memory["slots", event.device] = (_slots_allowed(options, event.epochs), {})
    elif isinstance(event, Requested | Pushed) and event.fresh is not None:
        memory["asked", event.device] = event.trip
        if isinstance(event, Pushed):
            _audit_push(options, event, memory)
        else:
            _audit_request(event, *memory["slots", event.device])
    elif isinstance(event, Aggregated):
        _audit_aggregation(options, event, memory, kind)
    elif isinstance(event, Merged) and not event.numbers.get("diverged"):
        _audit_merge(options, event, memory, kind)
    elif isinstance(event, Discarded) and event.staleness <= options.tau_max:
        raise Mismatch(f"discarded at staleness {event.staleness}, within tau_max {options.tau_max}")
    if isinstance(event, Discarded | Lost | Rejected):
        _forget_unlogged_merge(event.device, event.trip, memory)


def _slots_allowed(options: Any, epochs: int) -> int:
    return epochs if options.refresh == "every" else int(options.refresh)


def _audit_request(event: Requested, allowed: int, answers: dict[int, int | None]) -> None:
    """Check that a further request got a newer model than those before it."""
    is_further = event.slot not in answers and len(answers) < allowed
    if is_further and event.fresh in answers.values():
        raise Mismatch(f"the request in slot {event.slot} got version {event.fresh}, which the device had")
    answers.setdefault(event.slot, event.fresh)


def _audit_push(options: Any, event: Pushed, memory: dict[Any, Any]) -> None:
    trip, _, _, held = memory.get(("merged", event.device), (None, [], [], 0))
    held = held if trip == event.trip else event.base
    if not options.push_after or event.fresh - held < options.push_after:
        raise Mismatch(f"pushed version {event.fresh} to a device with {held}, within push_after {options.push_after}")


def _forget_unlogged_merge(device: int | None, trip: int | None, memory: dict[Any, Any]) -> None:
    """Mark a device's controls as unknown if its trip got the fresh model but no merge was logged."""
    if memory.get(("asked", device)) == trip and memory.get(("merged", device), (None,))[0] != trip:
        memory["device", device] = None


def _initial_controls(options: Any) -> tuple[Control, PastUpload | None]:
    return Control(options.lambda0, options.sigma0, options.iota0), None


def _audit_aggregation(options: Any, event: Aggregated, memory: dict[Any, Any], kind: Kind) -> None:
    (part,), n = event.contributions, event.numbers
    course = options.dynamic_server and options.controls == "course"
    by_version = course or (options.dynamic_server and options.judge == "base")
    control, past = memory.get(("server", None if course else part.device), _initial_controls(options))
    judged = part.device
    if by_version:
        judged, past = memory.get(("made", part.base), (part.device, None))
    age = event.round if kind == "sync" else event.version
    assert age is not None
    if kind == "sync":
        expect("k", n["k"], part.staleness - 1)
    if part.staleness > options.tau_max:
        raise Mismatch(f"aggregated at staleness {part.staleness}, beyond tau_max {options.tau_max}")
    if n.get("forgotten") and options.control_memory != "budget":
        raise Mismatch("a step was forgotten, which only control_memory = budget does")
    known, taught = past is not None and not n.get("forgotten"), _gradient_scale(options, n) != 0.0
    if bool(n.get("untaught")) != (known and not taught):
        raise Mismatch(f"untaught = {bool(n.get('untaught'))} contradicts lr = {n['lr']:g}")
    if n["adapted"] != (known and taught):
        raise Mismatch(
            "adapted, but there is no earlier aggregation to judge" if past is None else "should have adapted"
        )
    trip, betas, before, _ = memory.get(("merged", part.device), (None, [], [], 0))
    for name, values in (("beta", betas), ("n1", before)):
        _expect_list(name, n[name], values if trip == event.trip else [])
    if "passes" in n:
        expect("passes", n["passes"], memory["epochs", part.device])
    if n["adapted"] and past is not None:
        c = past.control
        kept = {"p": past.p, "s_p": past.s_p, "xi_p": past.xi_p, "lambda_p": c.lambda_, "sigma_p": c.sigma}
        for name, value in (kept | {"iota_p": c.iota}).items():
            expect(name, n[name], value)
        expect("gap", n["gap"], part.base - past.version - 1)
        if options.judge == "base":
            expect("judged", n["judged"], judged)
        if options.controls != "loss":
            expect("length_p", n["length_p"], past.length)
        expect("q", n["q"], _expected_slope(options, n))
        gradients = control_gradients(n["q"], options.mu_alpha, options.xi_min, past, options.equations, course)
        for name, value in zip(("grad_lambda", "grad_sigma", "grad_iota"), gradients, strict=True):
            expect(name, n[name], value)
        if course or judged == part.device:
            control = descend(control, gradients, options.control_rates())
        else:
            other, unused = memory[("server", judged)]
            memory["server", judged] = (descend(other, gradients, options.control_rates()), unused)
    expect("lambda", n["lambda"], control.lambda_)
    expect("sigma", n["sigma"], control.sigma)
    expect("iota", n["iota"], control.iota)
    xi = staleness_weight(control, age, part.staleness, options.xi_min)
    expect("xi", n["xi"], xi)
    expect("alpha", n["alpha"], saturate(options.mu_alpha, xi))
    expect("weight", part.weight, n["alpha"])
    length = event.update_norm / n["alpha"]
    if "length" in n:
        expect("length", n["length"], length)
    now = PastUpload(event.version, age, part.staleness, xi, control, n["course"] if course else length)
    if by_version:
        memory["made", event.version + 1] = part.device, now
        memory.pop(("made", event.version - options.tau_max), None)  # uploads from there are too stale
    own = None if course else part.device
    memory["server", own] = (control, now if options.dynamic_server and not by_version else None)


def _expected_slope(options: Any, n: Numbers) -> float:
    """Return the slope of the loss along the last step, or its cosine unless ``controls = "loss"``."""
    if options.controls != "loss":
        return -cosine(n["product"], n["length"], n["length_p"])
    return float(n["product"] / _gradient_scale(options, n))


def _gradient_scale(options: Any, n: Numbers) -> float:
    """Return the divisor that turns the displacement into the pseudo-gradient (E1, E5, E6)."""
    share = n.get("passes", n["steps"]) / n["steps"] if options.local_work == "passes" else 1.0
    if options.equations == "published":
        return float(n["lr"] * n["steps"]) * share
    betas = n["beta"] if isinstance(n["beta"], list) else [n["beta"]]
    betas = [0.0 for _ in betas] if options.merge == "rebase" else betas
    steps = [*(n["n1"] if isinstance(n["n1"], list) else [n["n1"]]), n["steps"]]
    *before, whole = n.get("reach", steps)
    return -training_scale(n["lr"], whole, before, betas) * share


def _expect_list(name: str, logged: Any, values: list[float]) -> None:
    """Check numbers of several merges (a list), of one (a number), or of none (0)."""
    found = logged if isinstance(logged, list) else [logged]
    wanted = values or [0]
    if len(found) != len(wanted):
        raise Mismatch(f"{name} is logged for {len(found)} merges, but there were {len(values)}")
    for one, value in zip(found, wanted, strict=True):
        expect(name, one, value)


def _audit_merge(options: Any, event: Merged, memory: dict[Any, Any], kind: Kind) -> None:
    device, n = ("device", event.device), event.numbers
    known = memory.get(device, (options.gamma0, options.upsilon0))
    gamma, upsilon = (n["gamma"], n["upsilon"]) if known is None else known
    expect("gamma", n["gamma"], gamma)
    expect("upsilon", n["upsilon"], upsilon)
    age = event.round if kind == "sync" else event.fresh
    assert age is not None
    trip, betas, before, held = memory.get(("merged", event.device), (None, [], [], 0))
    if trip != event.trip:
        betas, before, held = [], [], event.base
    s = event.fresh - held + 1
    if s < 2:
        raise Mismatch(f"fresh version {event.fresh} is not newer than {held}, which the device had")
    far = n["far"] if options.distance else 1.0
    phi = freshness_weight(gamma, upsilon, age, s, far)
    expect("phi", n["phi"], phi)
    expect("beta", n["beta"], saturate(options.mu_beta, phi) if options.beta == "learned" else options.beta)
    slopes = (0.0, 0.0)  # [privacy] withholds losses, so nothing is learned from them
    if "reward" in n:
        expect("reward", n["reward"], n["loss_before"] - n["loss_after"])
        if options.beta == "learned":
            slopes = merge_gradients(n["q"], options.mu_beta, phi, gamma, upsilon, age, s, options.equations, far)
    expect("gamma_after", n["gamma_after"], gradient_step(gamma, options.eta_gamma, slopes[0]))
    expect("upsilon_after", n["upsilon_after"], gradient_step(upsilon, options.eta_upsilon, slopes[1]))
    memory[device] = (n["gamma_after"], n["upsilon_after"])
    memory["merged", event.device] = (event.trip, [*betas, n["beta"]], [*before, n["n1"]], event.fresh)
