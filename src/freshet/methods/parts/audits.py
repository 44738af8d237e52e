"""Replaying logged decisions against the formulas, from the log and the configuration alone."""

from typing import Any

from freshet.core.about import Kind
from freshet.core.audit import Mismatch, expect
from freshet.core.server import NOT_FINITE
from freshet.methods.parts.staleness import (
    Control,
    Past,
    control_gradients,
    descend,
    freshness_weight,
    merge_gradients,
    moved,
    saturate,
    staleness_weight,
    training_scale,
)


def asmu(options: Any, event: dict[str, Any], memory: dict[Any, Any], kind: Kind) -> None:
    """Every alpha and beta of FedASMU and FedSSMU, and each control's whole history."""
    if event["kind"] == "trigger":
        memory["epochs", event["device"]] = event["epochs"]
    elif event["kind"] == "aggregate":
        _aggregate(options, event, memory, kind)
    elif event["kind"] == "merge":
        _merge(options, event, memory, kind)
    elif event["kind"] == "rejected" and event["reason"] == NOT_FINITE:
        control, _ = memory.get(("server", event["device"]), _start(options))
        memory["server", event["device"]] = (control, None)
    elif event["kind"] == "discard" and event["staleness"] <= options.tau_max:
        raise Mismatch(f"discarded at staleness {event['staleness']}, within tau_max {options.tau_max}")


def _start(options: Any) -> tuple[Control, Past | None]:
    return Control(options.lambda0, options.sigma0, options.iota0), None


def _aggregate(options: Any, event: dict[str, Any], memory: dict[Any, Any], kind: Kind) -> None:
    device = ("server", event["device"])
    control, past = memory.get(device, _start(options))
    age = event["round"] if kind == "sync" else event["version"]
    if kind == "sync":
        expect("k", event["k"], event["staleness"] - 1)
    if event["staleness"] > options.tau_max:
        raise Mismatch(f"aggregated at staleness {event['staleness']}, beyond tau_max {options.tau_max}")
    if event.get("forgotten") and options.control_memory != "budget":
        raise Mismatch("a step was forgotten, which only happens under control_memory = budget")
    if event["adapted"] != (past is not None and not event.get("forgotten")):
        raise Mismatch("adapted, but the device was not aggregated before" if past is None else "should have adapted")
    trip, beta, n1 = memory.get(("merged", event["device"]), (None, 0.0, 0))
    expect("beta", event["beta"], beta if trip == event["trip"] else 0.0)
    expect("n1", event["n1"], n1 if trip == event["trip"] else 0)
    if event["adapted"] and past is not None:
        c = past.control
        kept = {"p": past.p, "s_p": past.s_p, "xi_p": past.xi_p, "lambda_p": c.lambda_, "sigma_p": c.sigma}
        for name, value in (kept | {"iota_p": c.iota}).items():
            expect(name, event[name], value)
        expect("gap", event["gap"], event["base"] - past.version - 1)
        expect("q", event["q"], event["product"] / _scale(options, event, memory))
        gradients = control_gradients(event["q"], options.mu_alpha, options.xi_min, past, options.equations)
        for name, value in zip(("grad_lambda", "grad_sigma", "grad_iota"), gradients, strict=True):
            expect(name, event[name], value)
        control = descend(control, gradients, (options.eta_lambda, options.eta_sigma, options.eta_iota))
    expect("lambda", event["lambda"], control.lambda_)
    expect("sigma", event["sigma"], control.sigma)
    expect("iota", event["iota"], control.iota)
    xi = staleness_weight(control, age, event["staleness"], options.xi_min)
    expect("xi", event["xi"], xi)
    expect("alpha", event["alpha"], saturate(options.mu_alpha, xi))
    memory[device] = (
        control,
        Past(event["version"], age, event["staleness"], xi, control) if options.dynamic_server else None,
    )


def _scale(options: Any, event: dict[str, Any], memory: dict[Any, Any]) -> float:
    """What the displacement is divided by to give the pseudo-gradient (E1, E5, E6)."""
    if options.equations == "published":
        epochs: int = memory["epochs", event["device"]]
        return float(event["lr"] * epochs)
    return -training_scale(event["lr"], event["steps"], event["n1"], event["beta"])


def _merge(options: Any, event: dict[str, Any], memory: dict[Any, Any], kind: Kind) -> None:
    device = ("device", event["device"])
    gamma, upsilon = memory.get(device, (options.gamma0, options.upsilon0))
    expect("gamma", event["gamma"], gamma)
    expect("upsilon", event["upsilon"], upsilon)
    age = event["round"] if kind == "sync" else event["fresh"]
    s = event["fresh"] - event["base"] + 1
    if s < 2:
        raise Mismatch(f"fresh version {event['fresh']} is not newer than base {event['base']}")
    phi = freshness_weight(gamma, upsilon, age, s)
    expect("phi", event["phi"], phi)
    expect("beta", event["beta"], saturate(options.mu_beta, phi))
    expect("reward", event["reward"], event["loss_before"] - event["loss_after"])
    grad_gamma, grad_upsilon = merge_gradients(
        event["q"], options.mu_beta, phi, gamma, upsilon, age, s, options.equations
    )
    expect("gamma_after", event["gamma_after"], moved(gamma, options.eta_gamma, grad_gamma))
    expect("upsilon_after", event["upsilon_after"], moved(upsilon, options.eta_upsilon, grad_upsilon))
    memory[device] = (event["gamma_after"], event["upsilon_after"])
    memory["merged", event["device"]] = (event["trip"], event["beta"], event["n1"])


def sample_weighted(event: dict[str, Any]) -> None:
    """FedAvg's weights: each device's share of the round's samples."""
    if event["kind"] != "aggregate":
        return
    total = sum(event["samples"])
    for device, weight, samples in zip(event["devices"], event["weights"], event["samples"], strict=True):
        expect(f"weight of device {device}", weight, samples / total)
