"""The paper's suites: the right grids, and the scale in every output."""

import json

import pytest

from freshet.errors import ConfigError
from freshet.experiments import results
from freshet.experiments.grid import model_bytes, round_seconds
from freshet.experiments.store import Store
from freshet.paper.cells import CELLS, METHODS
from freshet.paper.suites import SUITES, plan


def grid(suite, **given):
    return plan(SUITES[suite], [0], **given)


def configs(found):
    return {job.scenario.name: job.config for job in found.jobs}


def test_every_suite_of_the_paper_is_there():
    assert list(SUITES) == ["table", "devices", "heterogeneity", "bandwidth", "ablation", "slots"]


def test_the_table_is_twelve_cells_times_twelve_methods_times_seeds():
    found = plan(SUITES["table"], [0, 1, 2])
    assert len(found.jobs) == 12 * 12 * 3
    assert {(j.scenario.name, j.entry.label) for j in found.jobs} == {(c, m) for c in CELLS for m in METHODS}
    assert len({job.key for job in found.jobs}) == len(found.jobs)
    for job in found.jobs:
        cell = CELLS[job.scenario.name]
        c = job.config
        assert (c.data.name, c.model.name, c.training.lr) == (cell.dataset, cell.model, cell.lr)
        assert (c.run.target, c.fleet.devices, c.run.per_round) == (cell.target, 100, 10)
        assert c.run.until == pytest.approx(500 * round_seconds(c), rel=1e-3)
        assert c.data.train_samples == c.data.test_samples == 0


def test_devices_are_100_200_250():
    found = configs(grid("devices"))
    assert [c.fleet.devices for c in found.values()] == [100, 200, 250]
    assert {c.run.per_round for c in found.values()} == {10}


def test_heterogeneity_is_5_110_440_each_as_long_as_500_rounds_of_its_fleet():
    found = configs(grid("heterogeneity"))
    assert [c.fleet.ratio for c in found.values()] == [5.0, 110.0, 440.0]
    assert all(c.run.until == pytest.approx(500 * round_seconds(c), rel=1e-3) for c in found.values())
    lengths = [c.run.until for c in found.values()]
    assert lengths[1] > 20 * lengths[0] and lengths[2] > 80 * lengths[0]
    assert all(c.run.until / c.run.eval_every == pytest.approx(500) for c in found.values())


@pytest.mark.parametrize("suite", ["devices", "heterogeneity", "bandwidth"])
def test_all_methods_of_a_setting_run_equally_long_and_the_notes_say_how_long(suite):
    found = grid(suite)
    by_world = {}
    for job in found.jobs:
        by_world.setdefault(job.scenario.name, set()).add((job.config.run.until, job.config.run.eval_every))
    assert all(len(lengths) == 1 for lengths in by_world.values())
    for name, lengths in by_world.items():
        assert any(note.startswith(f"{name}: {next(iter(lengths))[0]:,g} s") for note in found.notes)


def test_slower_links_make_longer_runs():
    found = list(configs(grid("bandwidth")).values())
    costless = round_seconds(configs(grid("devices"))["lenet-fmnist, 100 devices"])
    megabits = 8e-6 * model_bytes(found[0])
    for config, share in zip(found, (1, 1 / 50, 1 / 100), strict=True):
        transfer = 0.05 + 0.05 + megabits / (10 * share) + megabits / (50 * share)
        assert round_seconds(config) == pytest.approx(costless + transfer, rel=1e-9)
        assert config.run.until == pytest.approx(500 * (costless + transfer), rel=1e-3)


def test_a_length_given_by_hand_wins():
    found = grid("devices", settings=["run.until=700", "run.eval_every=7.0"])
    assert {(job.config.run.until, job.config.run.eval_every) for job in found.jobs} == {(700.0, 7.0)}


def test_bandwidth_is_divided_by_50_and_100():
    found = list(configs(grid("bandwidth")).values())
    assert [c.fleet.up_mbps for c in found] == pytest.approx([10, 10 / 50, 10 / 100])
    assert [c.fleet.down_mbps for c in found] == pytest.approx([50, 50 / 50, 50 / 100])
    assert {(c.fleet.up_latency, c.fleet.down_latency) for c in found} == {(0.05, 0.05)}


def test_the_normal_world_of_each_study_is_the_same_runs_as_in_the_table():
    table = {job.key for job in grid("table", cells="lenet-fmnist").jobs}
    for name, world in (("devices", "100 devices"), ("heterogeneity", "ratio 5")):
        assert {job.key for job in grid(name).jobs if job.scenario.name.endswith(world)} == table


def test_ablation_switches_the_parts_off():
    found = grid("ablation")
    assert [job.entry.label for job in found.jobs[:5]] == ["fedasmu", "fedasmu-da", "fedasmu-fa", "fedasmu-0", "fedavg"]
    switches = [(j.config.method.dynamic_server, j.config.method.adaptive_device) for j in found.jobs[:4]]
    assert switches == [(True, True), (False, True), (True, False), (False, False)]
    assert {j.config.method.apply for j in found.jobs[:4]} == {"mix"}, "the paper's method, not ours"
    assert list(configs(found)) == ["lenet-cifar10", "cnn-cifar10"]


def test_slots_are_learned_or_fixed():
    assert [job.config.method.slot for job in grid("slots").jobs] == ["rl", "h1", "h2", "h3"]


def test_methods_and_cells_can_be_chosen():
    found = grid("table", methods="fedasmu,fedavg", cells="textcnn-imdb,lenet-fmnist")
    assert [(j.scenario.name, j.entry.label) for j in found.jobs] == [
        ("textcnn-imdb", "fedasmu"),
        ("textcnn-imdb", "fedavg"),
        ("lenet-fmnist", "fedasmu"),
        ("lenet-fmnist", "fedavg"),
    ]
    with pytest.raises(ConfigError, match="--cell"):
        grid("table", cells="lenet-mnist")


# ---- scale


def test_scale_shrinks_devices_samples_and_rounds():
    found = configs(grid("devices", scale=0.2))
    assert [c.fleet.devices for c in found.values()] == [20, 40, 50]
    for c in found.values():
        assert (c.data.train_samples, c.data.test_samples) == (12_000, 2_000)
        assert (c.run.per_round, c.run.in_flight) == (2, 6)
        assert c.run.until == pytest.approx(100 * round_seconds(c), rel=1e-3), "a fifth of 500 rounds"


def test_buffers_shrink_with_the_devices_that_train_at_once():
    found = {job.entry.label: job.config for job in grid("table", cells="lenet-fmnist", scale=0.2).jobs}
    full = {job.entry.label: job.config for job in grid("table", cells="lenet-fmnist").jobs}
    assert (full["fedbuff"].method.K, full["port"].method.K) == (10, 5)
    assert (found["fedbuff"].method.K, found["port"].method.K) == (2, 1)


def test_a_scaled_heterogeneity_study_keeps_its_ratios():
    found = configs(grid("heterogeneity", scale=0.1))
    assert [c.fleet.ratio for c in found.values()] == [5.0, 110.0, 440.0]
    assert all(c.run.until == pytest.approx(50 * round_seconds(c), rel=1e-3) for c in found.values())
    assert all(c.run.until / c.run.eval_every == pytest.approx(100) for c in found.values()), "at least 100 tests"


@pytest.mark.parametrize("suite", list(SUITES))
def test_the_smallest_scale_still_makes_a_federation(suite):
    for job in grid(suite, scale=0.001).jobs:
        c = job.config
        assert c.fleet.devices >= 4 and c.run.per_round >= 2 and c.run.until >= 50
        assert c.data.train_samples >= 20 * c.fleet.devices


@pytest.mark.parametrize("scale", [0, -1, 1.01, float("nan")])
def test_a_scale_outside_0_1_is_refused(scale):
    with pytest.raises(ConfigError, match="--scale"):
        grid("slots", scale=scale)


def test_every_output_says_the_scale(tmp_path):
    found = grid("ablation", scale=0.1)
    assert found.stem == "ablation-scale0.1"
    assert "SCALED DOWN to 0.1" in found.title
    assert any("not the paper's conditions" in note for note in found.notes)
    record = results.document(
        found.jobs, Store(tmp_path), title=found.title, notes=found.notes, scale=found.scale_record
    )
    as_json, as_csv = results.write(record, tmp_path, found.stem)
    assert json.loads(as_json.read_text())["scale"]["scale"] == 0.1
    assert "scale" in as_csv.read_text().splitlines()[0]
    assert {row["scale"] for row in results.rows(record)} == {0.1}


def test_a_full_suite_does_not_mention_a_scale():
    found = grid("ablation")
    assert (found.stem, found.scale_record) == ("ablation", None)
    assert not any("SCALED" in text for text in (found.title, *found.notes))


# ---- published numbers


def test_published_numbers_stand_beside_ours_in_every_line_of_the_table(tmp_path):
    found = grid("table", cells="lenet-cifar10")
    record = results.document(found.jobs, Store(tmp_path), title="t", published=found.published)
    lines = {line["method"]: line for line in record["worlds"][0]["lines"]}
    assert lines["fedasmu"]["published"] == {"accuracy": 0.485, "time": 8_800}
    assert lines["feddyn"]["published"] == {"accuracy": 0.277, "time": None}
    assert all(line["published"] for line in lines.values())


def test_published_numbers_stand_only_beside_the_setting_of_the_table(tmp_path):
    found = grid("devices", methods="fedasmu")
    record = results.document(found.jobs, Store(tmp_path), title="t", published=found.published)
    assert [bool(world["lines"][0]["published"]) for world in record["worlds"]] == [True, False, False]


def test_overrides_get_a_note():
    notes = grid("slots", settings=["model.name=mlp", "run.executor=serial", "fedasmu.epsilon=0.2"]).notes
    assert "changed by --set: model.name=mlp, fedasmu.epsilon=0.2" in notes
