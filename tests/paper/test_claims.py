"""The paper's claims: every number is in its source, and verdicts follow the protocol."""

import os
from pathlib import Path

import pytest

from freshet.methods import class_and_preset
from freshet.paper.archive import compare_paired, read
from freshet.paper.claims import BASELINES, CLAIMS, Claim, answer, claims_section, claims_summary, verdict
from freshet.paper.studies import STUDIES, StudyRuns

from .archived_runs import write_run


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
    assert compare_paired(ours, theirs, least) == outcome


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (["win", "win"], "confirmed"),
        (["win", "loss"], "not confirmed"),
        (["tie"], "not confirmed"),
        (["win", "open"], "undecided"),
        (["win", "none"], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_claim_over_several_rivals_is_confirmed_only_by_all_of_them(outcomes, said) -> None:
    assert verdict(outcomes) == said


# ---- answers


def test_every_number_of_the_paper_gets_an_answer(archive):
    runs = read(archive)
    rows = claims_section([StudyRuns(STUDIES[0], runs, archive / "suites")])
    found = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:4]] for row in rows if "| fed" in row
    }
    assert found["fedasmu over fedbuff: accuracy 0.68 % to 64.75 %"] == ["+40.5 %", "confirmed"]
    assert found["fedasmu over fedasync: faster 11.42 % to 84.96 %"] == ["+50 %", "confirmed"]
    assert found["fedasmu over fedasync: accuracy 0.41 % to 58.93 %"] == ["-0.3 %", "not confirmed (tie)"]
    assert "fedasmu over fedsa: faster 19.83 % to 67.54 %" not in found
    assert "Not run: " in rows[-2] and "fedasmu over fedsa: faster 19.83 % to 67.54 %" in rows[-2]
    assert "slots: fedasmu over slot = h1: accuracy 2.4 %" in rows[-2]


def test_a_claim_run_in_one_cell_is_judged_there(archive, tmp_path):
    there = tmp_path / "none"
    both = [StudyRuns(STUDIES[0], read(archive), archive), StudyRuns(STUDIES[1], read(there), there)]
    over = next(claim for claim in CLAIMS if str(claim).startswith("fedasmu over fedbuff: accuracy"))
    assert answer(over, both) == (["+40.5 %", "not run"], "confirmed where it was run")


def test_figures_and_verdicts_use_the_seeds_that_both_have(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.5, 0.5)):
        write_run(tmp_path, "fedasmu", seed, [accuracy] * 61, 100.0)
    write_run(tmp_path / "suites" / "slots", "fedasmu", 0, [0.4] * 31, 200.0, "slot = 'h1'\n")
    runs = read(tmp_path)
    runs = {"fedasmu": [run._replace(options={"slot": "rl"}) for run in runs["fedasmu"]]}
    claim = next(one for one in CLAIMS if one.rivals == ("slot = h1",) and one.gain == "accuracy")
    figures, said = answer(claim, [StudyRuns(STUDIES[0], runs, tmp_path / "suites")])
    assert figures == ["+100.0 %"] and said == "undecided (too few seeds)"


def test_the_summary_counts_the_verdicts_of_each_suite(archive):
    lines = claims_summary([StudyRuns(STUDIES[0], read(archive), archive / "suites")], "more.md")
    table = [[entry.strip() for entry in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert table[0] == ["suite", "confirmed", "not confirmed", "not run"]
    assert table[1] == ["table", "3", "1", "16"], "over fedbuff twice, over fedasync in time; a tie in accuracy"
    assert table[-1][0] == "all" and sum(map(int, table[-1][1:])) == 51
    assert "(more.md#every-number-of-the-paper)" in lines[0]
