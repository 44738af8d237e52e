"""Only what is tested on the same data, with the same network, is ranked in one table."""

from pathlib import Path

from freshet.report.export import to_latex, to_pdf
from freshet.report.groups import comparables
from freshet.report.page import document
from freshet.report.reading import read_all

from .conftest import Write


def test_runs_on_different_data_have_tables_of_their_own(written: Write) -> None:
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


def test_a_network_a_held_out_part_and_other_custom_data_are_worlds_of_their_own(written: Write) -> None:
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


def test_exports_keep_worlds_apart_too(written: Write, tmp_path: Path) -> None:
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
