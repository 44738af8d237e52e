"""Against whom a method is held, and how ratios and bounds are told."""

import pytest

from freshet.report.groups import Ratio, assign_references, time_ratio


def held(names, named=()):
    kinds = ["sync" if name in ("fedssmu", "fedavg", "fedprox") else "async" for name in names.split()]
    found = assign_references(names.split(), kinds, [names.split().index(name) for name in named])
    return [None if place is None else names.split()[place] for place in found]


def test_fedasmu_for_the_asynchronous_fedssmu_for_the_synchronous():
    assert held("fedasync fedasmu fedavg fedssmu fedbuff") == ["fedasmu", None, "fedssmu", None, "fedasmu"]


def test_without_them_the_first_of_each_kind():
    assert held("fedasync fedbuff fedavg fedprox") == [None, "fedasync", None, "fedavg"]


def test_who_is_alone_of_its_kind_is_held_against_the_other_kinds_reference():
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
def test_a_side_that_never_got_there_gives_a_bound_or_nothing(sides, ratio):
    assert time_ratio(*sides) == ratio
