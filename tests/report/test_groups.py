"""Groups over seeds, comparables, references, headline numbers and settings."""

import json
from pathlib import Path

import pytest

from freshet.report.export import to_latex, to_pdf
from freshet.report.groups import (
    Ratio,
    assign_references,
    comparables,
    describe_divergence,
    group_runs,
    headline,
    settings_table,
    time_ratio,
    times_to,
)
from freshet.report.page import document
from freshet.report.reading import read, read_all

from .conftest import Write


def test_runs_that_differ_only_in_their_seed_are_one_group(written: Write) -> None:
    runs = read_all(written(f"r{seed}", seed=seed, run={"workers": seed}) for seed in (1, 2, 3))
    (group,) = group_runs(runs)
    assert (group.label, len(group.ended_runs)) == ("fedasmu", 3)


def test_settings_that_world_json_sets_aside_do_not_split_groups(written: Write) -> None:
    runs = [written("a", run={"target": 0.5, "new": 1}), written("b", seed=2, run={"target": 0.6, "new": 2})]
    assert [group.label for group in group_runs(read_all(runs))] == ["fedasmu (new=1)", "fedasmu (new=2)"]
    later = [
        written(f"c{n}", seed=n, run={"new": n}, world={"aside": ["run.new"]}) for n in (1, 2)
    ]  # a setting that only a later version knows
    assert len(group_runs(read_all(later))) == 1


def test_without_a_world_only_the_seed_is_set_aside(written: Write) -> None:
    places = [written(f"old{n}", seed=n, run={"workers": n}) for n in (1, 2)]
    for place in places:
        (place / "world.json").unlink()
    assert len(group_runs(read_all(places))) == 2


def test_labels_name_the_settings_that_differ(written: Write) -> None:
    plain, lossy, other = written("a"), written("b", fleet={"loss": 0.05}), written("c", method="fedavg")
    more = written("d", fleet={"loss": 0.5})
    assert [group.label for group in group_runs(read_all([plain, lossy, other, more]))] == [
        "fedasmu",
        "fedasmu (loss=0.05)",
        "fedavg",
        "fedasmu (loss=0.5)",
    ]


def test_a_setting_that_older_runs_lack_does_not_split_groups(written: Write) -> None:
    assert len(group_runs(read_all([written("old"), written("new", seed=2, training={"augment": False})]))) == 1


def test_unfinished_runs_are_not_averaged(written: Write) -> None:
    runs = read_all(
        [
            written("good", seed=1, accuracy=[0.1, 0.9]),
            written("stopped", seed=2, accuracy=[0.1, 0.2], status="interrupted"),
            written("crashed", seed=3, accuracy=[0.1, 0.3], status="failed"),
            written("killed", seed=4, accuracy=[0.1, 0.4], status=None),
        ]
    )
    (group,) = group_runs(runs)
    line = headline(group, 0.8, 10.0, None)
    assert [run.status for run in runs] == ["finished", "interrupted", "failed", "unfinished"]
    assert (line["runs"], line["all"], line["seeds"]) == (1, 4, [1])
    assert line["accuracy"] == {"median": 0.9, "low": 0.9, "high": 0.9, "count": 1, "of": 1}


def test_a_diverged_run_counts_as_ended(written: Write) -> None:
    runs = read_all(
        [
            written("good", seed=1, accuracy=[0.1, 0.5, 0.9, 0.9]),
            written("bad", seed=2, accuracy=[0.1, 0.2], status="diverged", summary={"diverged": 12.5}),
        ]
    )
    (group,) = group_runs(runs)
    line = headline(group, 0.8, 10.0, None)
    assert (line["runs"], line["diverged"], describe_divergence(line)) == (
        2,
        [{"seed": 2, "time": 12.5}],
        "1 diverged at 12.5 s",
    )
    assert line["accuracy"]["median"] == pytest.approx(0.55)
    page = document(runs)
    low, high, middle = page["worlds"][0]["accuracy"]["time"]["data"]
    assert middle["x"][-1] == 30.0 and (low["y"][-1], high["y"][-1]) == (20.0, 90.0), "its last value stays"
    assert "bad: the model diverged at 12.5 s; its last numbers enter the medians." in page["notes"]
    assert [run["diverged"] for run in page["runs"]] == [None, 12.5]


def test_a_method_is_compared_with_the_reference_of_its_kind(written: Write) -> None:
    curve = {"fedasync": [0.1, 0.1, 0.9], "fedasmu": [0.1, 0.9, 0.9], "fedavg": [0.1, 0.1], "fedprox": [0.9, 0.9]}
    runs = [
        written(name, method=name, accuracy=values, run={"trigger": "rounds" if name[3] in "ap" else "periodic"})
        for name, values in curve.items()
        if name not in ("fedasync", "fedasmu")
    ] + [written(name, method=name, accuracy=curve[name]) for name in ("fedasync", "fedasmu")]
    found = {line["label"]: line.get("against") for line in document(read_all(runs))["worlds"][0]["lines"]}
    assert (found["fedavg"], found["fedasmu"]) == (None, None)
    assert found["fedprox"] is not None and found["fedprox"]["reference"] == "fedavg"
    assert found["fedasync"] is not None and found["fedasync"]["time_raw"] == {"ratio": 2.0, "bound": "="}


def test_headline_by_hand(written: Write) -> None:
    curves = {1: [0.0, 0.8, 0.9, 0.9, 0.9, 0.9], 2: [0.0, 0.1, 0.8, 0.2, 0.2, 0.2], 3: [0.0, 0.1, 0.1, 0.1, 0.1, 0.7]}
    ours = [written(f"a{seed}", seed=seed, accuracy=curve) for seed, curve in curves.items()]
    theirs = [written(f"b{seed}", seed=seed, method="fedavg", accuracy=[0.1, 0.1]) for seed in (1, 2)]
    first, second = group_runs(read_all([*ours, *theirs]))
    line = headline(first, 0.8, 10.0, None)
    assert (line["accuracy"]["median"], line["best"]["median"]) == (0.7, 0.8)
    assert (line["times_raw"], line["times_mean"]) == ([10.0, 20.0, None], [50.0, None, None])
    assert (line["time_raw"]["median"], line["time_raw"]["count"]) == (20.0, 2)
    assert line["time_mean"]["median"] is None, "two of three seeds never reach it"
    against = headline(second, 0.8, 10.0, first)["against"]
    assert (against["pairs"], against["difference"]) == (2, pytest.approx((0.1 - 0.9 + 0.1 - 0.2) / 2))


def test_times_on_a_coarser_grid(written: Write) -> None:
    run = read(written("a", accuracy=[0.0, 0.9, 0.0, 0.9, 0.9]))
    assert times_to(run, 0.8, 10.0).raw == 10.0
    assert times_to(run, 0.8, 20.0).raw == 40.0, "a peak between two points of the grid does not count"


def test_settings_shared_and_differing(written: Write) -> None:
    runs = [
        written("a", seed=1),
        written("b", seed=2),
        written("c", method="fedavg", seed=1),
        written("d", method="fedavg", seed=2),
    ]
    found = settings_table(group_runs(read_all(runs)))
    assert found["differing"] == [{"section": "method", "key": "name", "values": ["fedasmu", "fedavg"]}]
    assert {"key": "seed", "value": "1, 2", "in": 2} in found["common"]["run"]


def test_damaged_and_half_written_logs_are_read_as_far_as_they_go(written: Write) -> None:
    place = written("a", status=None, accuracy=[0.1, 0.2])
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"time": 20.0, "accur')
    assert read(place).notes == []
    assert [row["accuracy"] for row in read(place).metrics] == [0.1, 0.2]
    with (place / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"time": 30.0, "accuracy": 0.3}) + "\n")
    run = read(place)
    assert len(run.metrics) == 2
    assert run.notes == ["metrics.jsonl is damaged at line 3; what follows is not shown"]


def test_a_run_given_twice_counts_once_and_equal_names_get_their_folders(written: Write) -> None:
    a, b = written("x/run"), written("y/run", seed=2)
    assert [run.name for run in read_all([a, b, a / ".." / "run"])] == ["x/run", "y/run"]


def test_tests_that_are_only_in_the_events_are_shown(written: Write) -> None:
    """The two logs of a run that goes on reach the disk at different times."""
    tests = [{"time": 10.0 * i, "kind": "evaluate", "version": i, "accuracy": i / 10, "loss": 1.0} for i in range(4)]
    run = read(written("a", status=None, accuracy=[0.0, 0.1], events=tests))
    assert (run.column("accuracy"), run.column("bytes_up")) == ([0.0, 0.1, 0.2, 0.3], [0.0, 1000.0, None, None])


def test_runs_on_different_data_have_separate_tables(written: Write) -> None:
    runs = [
        written("a", data={"name": "digits"}),
        written("b", data={"name": "cifar10"}, run={"target": 0.4}),
        written("c", data={"name": "digits"}, method="fedavg", accuracy=[0.9]),
    ]
    page = document(read_all(runs))
    assert [world["name"] for world in page["worlds"]] == ["digits", "cifar10"]
    assert [[line["label"] for line in world["lines"]] for world in page["worlds"]] == [
        ["fedasmu", "fedavg"],
        ["fedasmu"],
    ]
    assert [world["target"] for world in page["worlds"]] == [0.8, 0.4]
    assert [(run["world"], run["group"]) for run in page["runs"]] == [(0, 0), (1, 0), (0, 1)]
    assert page["settings"]["labels"] == ["digits: fedasmu", "digits: fedavg", "cifar10: fedasmu"]
    assert page["subject"]["configurations"] == 3


def test_fleet_partition_and_training_may_differ_and_the_labels_say_so(written: Write) -> None:
    runs = [
        written("a", data={"concentration": 0.1}, fleet={"ratio": 5.0}),
        written("b", data={"concentration": 1.0}, fleet={"ratio": 9.0}),
    ]
    [world] = document(read_all(runs))["worlds"]
    assert [line["label"] for line in world["lines"]] == [
        "fedasmu (ratio=5, concentration=0.1)",
        "fedasmu (ratio=9, concentration=1)",
    ]


def test_other_networks_held_out_parts_and_custom_data_are_not_comparable(written: Write) -> None:
    base = written("a")
    others = {
        "network": written("b", model={"name": "lenet5"}),
        "held out": written("c", data={"validation": 0.2}),
        "test set": written("d", world={"test_samples": 8}),
    }
    for what, other in others.items():
        assert len(comparables(read_all([base, other]))) == 2, what
    assert [world.name for world in comparables(read_all([base, others["network"]]))] == [
        "custom, custom",
        "custom, lenet5",
    ]
    assert [world.name for world in comparables(read_all([base, others["test set"]]))] == [
        "custom, 7 test samples",
        "custom, 8 test samples",
    ]
    assert [world.name for world in comparables(read_all([base, *others.values()]))][:3] == [
        "custom, custom, test set, 7 test samples",
        "custom, lenet5",
        "custom, custom, held-out 20 %",
    ]


def test_exports_separate_comparables_too(written: Write, tmp_path: Path) -> None:
    runs = read_all([written("a", data={"name": "digits"}), written("b", data={"name": "cifar10"}, accuracy=[0.3])])
    to_latex(runs, tmp_path / "t.tex")
    table = (tmp_path / "t.tex").read_text()
    assert table.count(r"\begin{tabular}") == 2
    assert "% digits\n" in table and "% cifar10\n" in table
    assert r"\textbf" not in table, "nobody to be better than"
    to_pdf(runs, tmp_path / "f.pdf")
    assert (tmp_path / "f.pdf").read_bytes().count(b"/Type /Page ") == 5, (
        "two pages of curves each, and times where some get there"
    )


def held(names, named=()):
    kinds = ["sync" if name in ("fedssmu", "fedavg", "fedprox") else "async" for name in names.split()]
    found = assign_references(names.split(), kinds, [names.split().index(name) for name in named])
    return [None if place is None else names.split()[place] for place in found]


def test_fedasmu_for_the_asynchronous_fedssmu_for_the_synchronous():
    assert held("fedasync fedasmu fedavg fedssmu fedbuff") == ["fedasmu", None, "fedssmu", None, "fedasmu"]


def test_without_them_the_first_of_each_kind():
    assert held("fedasync fedbuff fedavg fedprox") == [None, "fedasync", None, "fedavg"]


def test_a_method_alone_of_its_kind_is_compared_with_the_other_reference():
    assert held("fedasmu fedasmu-da fedavg") == [None, "fedasmu", "fedasmu"]
    assert held("fedavg fedprox fedasmu") == [None, "fedavg", "fedavg"]
    assert held("fedasmu fedavg") == [None, "fedasmu"]
    assert held("fedavg fedasmu") == [None, "fedavg"]
    assert held("fedavg") == [None]
    assert assign_references([], []) == []


def test_one_named_reference_is_for_all_two_are_for_each_kind():
    names = "fedasmu fedasync fedssmu fedavg"
    assert held(names, ["fedavg"]) == ["fedavg", "fedavg", "fedavg", None]
    assert held(names, ["fedasync", "fedavg"]) == ["fedasync", None, "fedavg", None]


def test_more_than_one_means_longer():
    assert str(time_ratio(160.0, 160.0, 100.0, 100.0)) == "1.60x"
    assert str(time_ratio(50.0, 50.0, 100.0, 100.0)) == "0.50x"


@pytest.mark.parametrize(
    ("sides", "ratio"),
    [
        ((None, 600.0, 100.0, 100.0), Ratio(6.0, ">")),
        ((300.0, 300.0, None, 600.0), Ratio(0.5, "<")),
        ((None, 600.0, None, 600.0), None),
        ((100.0, 100.0, None, None), None),
        ((100.0, 100.0, 0.0, 0.0), None),
    ],
)
def test_a_missed_target_gives_a_bound_or_no_ratio(sides, ratio):
    assert time_ratio(*sides) == ratio
