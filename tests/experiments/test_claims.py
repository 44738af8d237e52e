"""The paper's sentences: every number stands in its source, and a verdict is what the protocol calls one."""

import os
from pathlib import Path

import pytest

from freshet.methods import class_and_preset
from freshet.paper.claims import BASELINES, CLAIMS, Claim, compare, verdict


@pytest.mark.skipif("FRESHET_PAPER" not in os.environ, reason="FRESHET_PAPER does not name the paper's source")
@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_both_ends_of_a_claim_stand_in_the_papers_evaluation(claim: Claim) -> None:
    text = Path(os.environ["FRESHET_PAPER"]).read_text().replace("{", "").replace("}", "").replace("\\", "")
    for number in (claim.least, claim.most):
        assert any(f"{form}%" in text for form in (f"{number:g}", f"{number:.1f}", f"{number:.2f}")), number


def test_no_claim_is_made_twice() -> None:
    assert len({str(claim) for claim in CLAIMS}) == len(CLAIMS) == 51


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.suite == "table"], ids=str)
def test_rivals_of_the_main_table_are_methods_of_the_same_kind(claim: Claim) -> None:
    assert class_and_preset(claim.rivals[0])[0].about.kind == class_and_preset(claim.ours)[0].about.kind


def test_a_claim_reads_as_a_sentence() -> None:
    assert str(CLAIMS[0]) == "fedasmu over fedasync: faster 11.42 % to 84.96 %"
    assert str(Claim("slots", "fedasmu", ("slot = h1",), "accuracy", 2.4, 2.4)) == (
        "slots: fedasmu over slot = h1: accuracy 2.4 %"
    )
    assert str(Claim("bandwidth", "fedssmu", BASELINES, "time", 1, 2, ("bandwidth 1/50",))) == (
        "bandwidth 1/50: fedssmu over the baselines: faster 1 % to 2 %"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "least", "outcome"),
    [
        ([0.80, 0.81, 0.82], [0.70, 0.72, 0.71], 0.01, "win"),
        ([0.70, 0.72, 0.71], [0.80, 0.81, 0.82], 0.01, "loss"),
        ([0.80, 0.81, 0.82], [0.805, 0.806, 0.815], 0.01, "tie"),
        ([0.80, 0.90, 0.95], [0.81, 0.80, 0.80], 0.01, "open"),
        ([-300.0], [-300.0], 0.0, "tie"),
        ([], [], 0.0, "none"),
    ],
)
def test_a_win_needs_every_seed_and_more_than_the_least(ours, theirs, least, outcome) -> None:
    assert compare(ours, theirs, least) == outcome


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (["win", "win"], "confirmed"),
        (["win", "loss"], "not confirmed"),
        (["tie"], "not confirmed"),
        (["win", "open"], "cannot be told"),
        (["win", "none"], "cannot be told"),
        ([], "cannot be told"),
    ],
)
def test_a_claim_over_several_rivals_is_confirmed_only_by_all_of_them(outcomes, said) -> None:
    assert verdict(outcomes) == said
