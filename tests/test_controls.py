"""scripts/controls.py and scripts/slots.py measure what they claim."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from freshet.methods.fedasmu import FedASMU

SCRIPTS = Path(__file__).parent.parent / "scripts"


def test_true_slope_is_the_gradient_of_the_devices_loss_along_its_last_step(federate, tmp_path) -> None:
    federation, before = federate({"name": "fedasmu", "slot": "random"}), FedASMU.receive
    recorder = runpy.run_path(str(SCRIPTS / "controls.py"))["SlopeRecorder"](federation)
    with recorder.recording():
        result = federation.run(200, out=tmp_path / "run")
    assert FedASMU.receive is before, "the method is restored"
    assert len(recorder.found) == result.summary["adaptations"] > 0
    device = max(recorder.last_updates)
    made, step = recorder.last_updates[device]
    model = recorder.model
    model.load(made)
    x, y = recorder.samples.take(torch.from_numpy(federation.shards[device]))
    loss = torch.nn.functional.cross_entropy(model.module.eval()(x), y)
    gradients = torch.autograd.grad(loss, list(model.module.parameters()))
    model.load(step)  # the same vector, cut into the same parameters
    expected = sum(float((g * p.detach()).sum()) for g, p in zip(gradients, model.module.parameters(), strict=True))
    assert recorder.true_slope(device) == pytest.approx(expected, rel=0.05, abs=1e-3)


def test_merges_per_request_match_the_log(monkeypatch, capsys) -> None:
    names = runpy.run_path(str(SCRIPTS / "slots.py"))
    scope = names["logged_requests"].__wrapped__.__globals__
    for name in scope["RUN_SECONDS"]:
        monkeypatch.setitem(scope["RUN_SECONDS"], name, 200.0)
    monkeypatch.setitem(scope, "WORTH_SEEDS", (3,))
    requests = names["logged_requests"]("fedasmu", "random", 3)
    found = [request for request in requests if request.reward is not None]
    assert 0 < len(found) < len(requests) and names["merge_rate"](requests) == len(found) / len(requests)
    names["print_worth"]()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    mine = [row for row in rows if row[0].strip() == "fedasmu"]
    assert sum(int(row[2].split()[-1]) for row in mine) == len(requests)
    rewards = [float(row[3].split("+-")[0]) * int(row[2].split()[-1]) for row in mine]
    assert sum(rewards) == pytest.approx(np.sum([request.reward for request in found]), abs=1e-4 * len(requests))


def test_scripted_selectors_are_those_of_the_methods() -> None:
    names = runpy.run_path(str(SCRIPTS / "slots.py"))
    for world in names["SCRIPTED"]:
        reward = names["reward_by_slot"](world, 4)
        assert max(range(1, 6), key=reward) == 4
        assert names["table_finds"]("shaped", reward, 4, 0)
        found, moved = names["meta_model_finds"]("printed", reward, 4, 0)
        assert not found and moved < 1e-5, "the printed meta model keeps its first choice"


def test_the_distribution_before_the_first_lesson_is_recorded(federate, tmp_path) -> None:
    names, before = runpy.run_path(str(SCRIPTS / "slots.py")), FedASMU.instruct
    recorder = names["FirstAndLast"]()
    with recorder.recording():
        federate({"name": "fedasmu", "selector": "shaped"}).run(100, out=tmp_path / "run")
    assert FedASMU.instruct is before, "the method is restored"
    assert recorder.meta.lessons > 0 and (recorder.first != recorder.meta.distribution()).any()
    assert recorder.first.argmax() == len(recorder.first) // 2, "the prior prefers the middle"
