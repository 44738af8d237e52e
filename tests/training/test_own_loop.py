"""A user's own loop takes the same trip as the built-in one: same bits, same merges, same steps."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from freshet.core.messages import Slot
from freshet.core.method import LocalRule
from freshet.errors import RunError
from freshet.methods import class_and_preset, method_options
from freshet.runs.checkpoint import pack, unpack
from freshet.training.network import initial_weights
from freshet.training.options import TrainingOptions
from freshet.training.own_loop import rebind
from freshet.training.trainer import Trainer
from freshet.training.trip import TripOutcome
from tests.training.test_trainer import (
    SAMPLES,
    SEED,
    federated_data,
    fresh_model,
    fresh_rule,
    mlp,
    same,
    trainer,
    trip_input,
    with_batch_norm,
    with_dropout,
)

STEPS = -(-SAMPLES // 8)


def train_batch(model: nn.Module, optimiser: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    x, y = batch
    optimiser.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimiser.step()
    return loss


def by_step(model, data, trip):
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    for _ in range(trip.epochs):
        for batch in data.batches(8):
            loss = train_batch(model, optimiser, batch)
            trip.step()
    return {"loss": loss.item()}


def by_epoch(model, data, trip):
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    for _ in range(trip.epochs):
        for batch in data.batches():  # training.batch_size is 8
            train_batch(model, optimiser, batch)
        trip.step()


def by_yield(model, data, trip):
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    for _ in range(trip.epochs):
        for batch in data.batches(8):
            loss = train_batch(model, optimiser, batch)
        yield
    return {"loss": loss.item()}


def between_epochs(model, data, trip):
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    for epoch in range(trip.epochs):
        if epoch:
            yield
        for batch in data.batches(8):
            train_batch(model, optimiser, batch)


def until_told(model, data, trip):
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    while True:
        for batch in data.batches(8):
            train_batch(model, optimiser, batch)
            if not trip.step():
                return


LOOPS = [by_step, by_epoch, by_yield, between_epochs, until_told]


def with_loop(loop: Any, factory: Any = mlp, **options: Any) -> Trainer:
    given = TrainingOptions(**({"epochs": 3, "batch_size": 8} | options))
    return Trainer(factory, federated_data(), given, SEED, loop=loop)


def run(loop: Any, factory: Any = mlp, **work: Any) -> TripOutcome:
    return with_loop(loop, factory).train(trip_input(factory, **work))


# ---- the same trip


@pytest.mark.parametrize("factory", [mlp, with_dropout, with_batch_norm])
@pytest.mark.parametrize("loop", LOOPS)
def test_plain_sgd_in_any_form_has_the_bits_of_the_built_in_loop(loop, factory):
    mine, builtin = run(loop, factory), trainer(factory, fast=False).train(trip_input(factory))
    assert mine.weights.tobytes() == builtin.weights.tobytes()
    assert mine.steps == builtin.steps == 3 * STEPS


@pytest.mark.parametrize("slot", [1, 2, 3])
@pytest.mark.parametrize("factory", [mlp, with_dropout, with_batch_norm])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_fresh_model_is_merged_at_the_start_of_the_slots_epoch(loop, factory, slot):
    given = {"slot": slot, "rule": fresh_rule(slot=slot), "fresh": fresh_model(factory)}
    mine, builtin = run(loop, factory, **given), trainer(factory, fast=False).train(trip_input(factory, **given))
    assert mine.weights.tobytes() == builtin.weights.tobytes()
    assert mine.merges == builtin.merges and mine.merges[0].numbers["n1"] == (slot - 1) * STEPS
    assert mine.memory == builtin.memory


@pytest.mark.parametrize("loop", LOOPS)
def test_several_slots_and_answers_without_a_newer_model(loop):
    slots, answers = (Slot(2, "fixed"), Slot(3, "again")), (None, fresh_model())
    work = trip_input(rule=fresh_rule(refresh=2))._replace(slots=slots, fresh=answers)
    mine, builtin = with_loop(loop).train(work), trainer(fast=False).train(work)
    assert mine.weights.tobytes() == builtin.weights.tobytes() and mine.merges == builtin.merges


@pytest.mark.parametrize("loop", LOOPS)
def test_merge_only_stops_the_loop_after_the_last_answer(loop):
    work = trip_input(slot=2, rule=fresh_rule(), fresh=fresh_model(), merge_only=True)
    mine = with_loop(loop).train(work)
    assert mine.merges == trainer(fast=False).train(work).merges and mine.steps == STEPS


def test_the_code_of_an_ended_loop_is_left_by_an_exception_that_no_handler_of_errors_stops():
    seen = []

    def careful(model, data, trip):
        try:
            by_step(model, data, trip)
        except Exception:
            seen.append("handler")
        finally:
            seen.append("left")

    work = trip_input(slot=2, rule=fresh_rule(), fresh=fresh_model(), merge_only=True)
    with_loop(careful).train(work)
    assert seen == ["left"]


def test_a_loop_that_swallows_everything_still_ends():
    def stubborn(model, data, trip):
        for _ in range(5):
            with contextlib.suppress(BaseException):
                by_step(model, data, trip)

    work = trip_input(slot=2, rule=fresh_rule(), fresh=fresh_model(), merge_only=True)
    mine, builtin = with_loop(stubborn).train(work), trainer(fast=False).train(work)
    assert mine.merges == builtin.merges


# ---- what a trip leaves behind


def foreign_draws(model, data, trip):
    for _ in range(trip.epochs):
        for _ in data.batches(8):
            noise = float(torch.rand(())) + float(np.random.rand()) + random.random()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.01 * noise)
            trip.step()


def test_draws_of_torch_numpy_and_random_are_the_trips_own():
    first = run(foreign_draws)
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(99)
    assert same(run(foreign_draws), first)
    assert not same(run(foreign_draws, trip=2), first)


def test_the_callers_random_states_stay():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()
    run(foreign_draws)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tobytes(), random.getstate()) == before[1:]


def test_a_module_is_new_in_every_trip():
    """What the user's code leaves in it would make a result depend on the trips before."""

    def leaves_traces(model, data, trip):
        model.seen = getattr(model, "seen", 0) + 1
        model[0].weight.requires_grad = False
        assert model.seen == 1 and all(p.grad is None for p in model.parameters())
        return by_step(model, data, trip)

    one = with_loop(leaves_traces)
    first = one.train(trip_input())
    one.train(trip_input(trip=2, device=1))
    assert same(one.train(trip_input()), first)


def test_the_model_is_on_train_mode_and_modes_survive_a_merge():
    modes = []

    def frozen_layer(model, data, trip):
        modes.append(model.training)
        model[1].eval()
        for _ in by_yield(model, data, trip):
            modes.append((model.training, model[1].training))
            yield

    run(frozen_layer, with_batch_norm, slot=2, rule=fresh_rule(), fresh=fresh_model(with_batch_norm))
    assert modes == [True, (True, False), (True, False), (True, False)]


def replace_tensors(model: nn.Module, how: str) -> None:
    if how == "data":
        model[0].weight.data = model[0].weight.data.clone()
    elif how == "new parameter":
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    elif how == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    elif how == "vector":
        flat = nn.utils.parameters_to_vector(model.parameters()).clone()
        nn.utils.vector_to_parameters(flat, model.parameters())
    else:
        model[1].running_mean.data = model[1].running_mean.data.clone()


@pytest.mark.parametrize("how", ["data", "new parameter", "assign", "vector", "buffer"])
def test_replaced_tensors_are_found_again(how):
    """Some libraries put new tensors in the place of the model's own."""

    def replacing(model, data, trip):
        for _ in range(trip.epochs):
            optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
            for batch in data.batches(8):
                train_batch(model, optimiser, batch)
            replace_tensors(model, how)
            yield

    given = {"slot": 3, "rule": fresh_rule(slot=3), "fresh": fresh_model(with_batch_norm)}
    mine = run(replacing, with_batch_norm, **given)
    builtin = trainer(with_batch_norm, fast=False).train(trip_input(with_batch_norm, **given))
    assert mine.weights.tobytes() == builtin.weights.tobytes() and mine.merges == builtin.merges


def test_a_removed_parameter_is_one_sentence():
    one = trainer(fast=False)
    one.flat.module[0] = nn.Linear(6, 9)
    with pytest.raises(RunError, match=r"mine removed or reshaped the parameter 0\.weight"):
        rebind(one.flat, "mine")


# ---- data


def test_data_is_a_dataset_of_the_devices_samples():
    seen: dict[str, Any] = {}

    def looks(model, data, trip):
        seen.update(length=len(data), first=data[0], last=data[-1], rows=[int(y) for _, y in data])
        with pytest.raises(IndexError):
            data[len(data)]
        loader = DataLoader(data, batch_size=16, shuffle=True)
        trip.steps_per_epoch = len(loader)
        optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
        for _ in range(trip.epochs):
            for batch in loader:
                train_batch(model, optimiser, batch)
                trip.step()

    given = {"slot": 2, "rule": fresh_rule(), "fresh": fresh_model()}
    one, two = run(looks, **given), run(looks, **given)
    samples = federated_data().train
    assert seen["length"] == SAMPLES and seen["rows"] == samples.y[:SAMPLES].tolist()
    assert torch.equal(seen["first"][0], samples.x[0]) and torch.equal(seen["last"][0], samples.x[SAMPLES - 1])
    assert same(one, two) and one.steps == 3 * 4 and one.merges[0].numbers["n1"] == 4


def test_every_pass_over_batches_has_all_samples_in_a_new_order():
    passes = []

    def collects(model, data, trip):
        batches = data.batches(20)
        assert len(batches) == 3 and trip.steps_per_epoch == 3
        for _ in range(2):
            passes.append(torch.cat([x for x, _ in batches]))
        trip.step()

    assert run(collects).steps == 6
    rows = [sorted(map(tuple, one.tolist())) for one in passes]
    assert rows[0] == rows[1] == sorted(map(tuple, federated_data().train.x[:SAMPLES].tolist()))
    assert not torch.equal(passes[0], passes[1])


def test_the_trip_tells_its_numbers():
    seen = []

    def looks(model, data, trip):
        seen.append((trip.device, trip.number, trip.epochs, trip.lr, trip.steps, trip.seed))
        trip.steps_per_epoch = 1
        trip.step()
        assert trip.steps == 1

    run(looks, trip=4, device=1, lr=0.3), run(looks, trip=5, device=1, lr=0.3)
    assert seen[0][:5] == (1, 4, 3, 0.3, 0) and seen[0][5] != seen[1][5] and 0 <= seen[0][5] < 2**32


# ---- hurry


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("loop", [until_told, by_yield])
def test_a_hurried_trip_ends_with_its_epoch(loop, epoch):
    batches = []

    class Hurrying:
        """The device's data. The server's request comes with the second batch of the epoch."""

        def __init__(self, data: Any) -> None:
            self._data = data

        def batches(self, size: int) -> Any:
            for batch in self._data.batches(size):
                batches.append(batch)
                if len(batches) == (epoch - 1) * STEPS + 2:
                    trip.hurry()
                yield batch

    one = with_loop(lambda model, data, trip: loop(model, Hurrying(data), trip))
    trip = one.begin(trip_input().assignment, (), LocalRule(), {})
    assert trip.advance(lambda: True)
    assert trip.finish().steps == len(batches) == epoch * STEPS


# ---- pause and replay


@pytest.mark.parametrize("loop", LOOPS)
def test_a_paused_trip_is_trained_again_from_its_start_with_the_same_bits(loop):
    slots = (Slot(2, "fixed"), Slot(3, "again"))
    work = trip_input(with_dropout, rule=fresh_rule(refresh=2))
    answers = (fresh_model(with_dropout), fresh_model(with_dropout, version=7))
    whole = with_loop(loop, with_dropout).train(work._replace(slots=slots, fresh=answers))
    saved: dict[str, Any] = {"answers": []}
    for number, fresh in enumerate((None, *answers)):
        trip = with_loop(loop, with_dropout).begin(work.assignment, slots, work.rule, {})
        if number:
            trip.restore(unpack(*pack(saved)))
            assert trip.asks_at == slots[number - 1]
            trip.merge(fresh)
        if trip.advance(lambda: False):
            assert same(trip.finish(), whole)
            return
        assert trip.asks_at == slots[number]
        saved = trip.save()
    pytest.fail("the trip does not end")


def test_a_request_without_an_answer_is_passed_over():
    slots = (Slot(2, "fixed"), Slot(3, "again"))
    trip = with_loop(by_step).begin(trip_input().assignment, slots, fresh_rule(refresh=2), {})
    asked = []

    def answer() -> bool:
        asked.append(trip.asks_at.epoch)
        trip.continue_unanswered() if len(asked) == 1 else trip.merge(fresh_model())
        return True

    assert trip.advance(answer) and asked == [2, 3]
    assert [merge.numbers["n1"] for merge in trip.finish().merges] == [2 * STEPS]


# ---- methods that change gradients


def adjusting(model, data, trip):
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    for _ in range(trip.epochs):
        for x, y in data.batches(8):
            optimiser.zero_grad()
            cross_entropy(model(x), y).backward()
            trip.adjust()
            optimiser.step()
            trip.step()


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn", "asofed"])
def test_adjust_adds_the_terms_of_the_method(method):
    rule = class_and_preset(method)[0].rule(method_options(method, {}))
    work = trip_input(rule=rule, seconds=3.0)
    numbers, vector = {"alpha_k": 0.1, "heard": 0}, initial_weights(mlp, SEED + 3)
    assignment = work.assignment._replace(instruction=numbers, vectors={"c": vector})
    work = work._replace(assignment=assignment)
    mine, builtin = with_loop(adjusting).train(work), trainer(fast=False).train(work)
    assert mine.weights.tobytes() == builtin.weights.tobytes()
    assert mine.memory.keys() == builtin.memory.keys() and mine.vectors.keys() == builtin.vectors.keys()
    for name, vector in builtin.vectors.items():
        assert vector.tobytes() == mine.vectors[name].tobytes()
    plain = with_loop(by_step).train(trip_input())
    assert mine.weights.tobytes() != plain.weights.tobytes()


def test_a_loop_that_forgets_to_adjust_is_one_sentence():
    rule = class_and_preset("fedprox")[0].rule(method_options("fedprox", {}))
    with pytest.raises(RunError, match=r"call trip\.adjust\(\) in by_step"):
        run(by_step, rule=rule)


def test_adjust_leaves_parameters_without_a_gradient_alone():
    rule = class_and_preset("fedprox")[0].rule(method_options("fedprox", {"mu": 1.0}))

    def half(model, data, trip):
        for x, _ in data.batches(8):
            (model[0](x).sum() * 1e-3).backward()
            trip.adjust()
            assert model[2].weight.grad is None and model[0].weight.grad is not None
            with torch.no_grad():
                model[0].weight -= 0.1 * model[0].weight.grad
            trip.step()

    assert run(half, rule=rule).steps == STEPS


# ---- metrics and mistakes


def test_metrics_are_reported_under_their_names():
    assert run(by_step).report.keys() == run(by_yield).report.keys() == {"train_loss"}
    loops = {
        "tensor": lambda model, data, trip: _stepped(trip, {"a": torch.tensor(2.5), "b": float("nan")}),
        "nothing": lambda model, data, trip: _stepped(trip, None),
    }
    assert run(loops["tensor"]).report == {"train_a": 2.5} and run(loops["nothing"]).report == {}


def _stepped(trip: Any, answer: Any) -> Any:
    trip.steps_per_epoch = 1
    trip.step()
    return answer


MISTAKES = {
    "never called": (lambda m, d, t: None, r"took no step on device 0; call trip\.step\(\)"),
    "unknown epoch": (lambda m, d, t: t.step(), r"draw batches with data\.batches\(n\), or set trip\.steps_per_epoch"),
    "steps": (lambda m, d, t: t.step(0), "reported 0 steps"),
    "a text": (lambda m, d, t: _stepped(t, "good"), "returned 'good'; return a dict of numbers"),
    "too many": (lambda m, d, t: _stepped(t, {f"n{k}": k for k in range(51)}), "return at most 50"),
    "too long": (lambda m, d, t: _stepped(t, {"n" * 51: 1}), "with at most 50 characters"),
    "no numbers": (lambda m, d, t: _stepped(t, {"a": "b"}), "return a dict of numbers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake):
    loop, text = MISTAKES[mistake]
    with pytest.raises(RunError, match=text) as caught:
        run(loop)
    assert "\n" not in str(caught.value)


def early(model, data, trip):
    batches = data.batches(8)
    for batch in batches:
        train_batch(model, torch.optim.SGD(model.parameters(), lr=trip.lr), batch)
    trip.step()


def late(model, data, trip):
    for _ in range(trip.epochs):
        early(model, data, replace_step(trip))
    trip.step(trip.epochs * STEPS)


def replace_step(trip: Any) -> Any:
    return type("Silent", (), {"lr": trip.lr, "step": lambda self: True})()


@pytest.mark.parametrize("loop", [early, late])
def test_a_fresh_model_needs_steps_after_it(loop):
    assert run(loop).steps in (STEPS, 3 * STEPS)
    with pytest.raises(RunError, match=rf"{loop.__name__} took no step after epoch \d on device 0, where a fresh"):
        run(loop, slot=3, rule=fresh_rule(slot=3), fresh=fresh_model())


def too_many(model, data, trip):
    for _ in range(trip.epochs + 1):
        list(data.batches(8))
        yield


def test_a_generator_yields_once_per_epoch():
    with pytest.raises(RunError, match=r"yields more often than trip\.epochs = 3 times"):
        run(too_many)
    counted = [4, 5, 6]

    def says(model, data, trip):
        yield from counted

    assert run(says).steps == 15


def test_an_error_of_the_users_code_is_shown_as_it_is():
    def broken(model, data, trip):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(broken)


def test_divergence_is_noticed():
    def explodes(model, data, trip):
        with torch.no_grad():
            model[0].weight.fill_(float("inf"))
        _stepped(trip, None)

    assert run(explodes).diverged


def test_a_trip_cannot_be_used_after_its_end():
    kept = []

    def keeps(model, data, trip):
        kept.append(trip)
        _stepped(trip, None)

    run(keeps)
    with pytest.raises(RunError, match="keep no trip beyond the call"):
        kept[0].step()
