"""The paper's claims: every number is in its source, and verdicts follow the protocol."""

import os
from pathlib import Path

import pytest

from freshet.methods import class_and_preset
from freshet.paper.archive import compare_paired, read
from freshet.paper.claims import (
    BASELINES,
    CLAIMS,
    Claim,
    answer,
    claims_section,
    claims_summary,
    verdict,
    verdicts_sentence,
)
from freshet.paper.studies import STUDIES, AblationRuns, Archive, StudyRuns

from .archived_runs import write_ablation, write_run


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


def former(*found: StudyRuns) -> Archive:
    """An archive with these studies of the former world only."""
    return Archive(list(found), {}, [])


def new(results: Path) -> Archive:
    return Archive([], {}, [AblationRuns.read(name, results) for name in ("lenet-cifar10", "cnn-cifar10")])


def claim_of(words: str) -> Claim:
    return next(claim for claim in CLAIMS if str(claim).startswith(words))


def test_every_number_of_the_paper_gets_an_answer(archive):
    rows = claims_section(former(StudyRuns(STUDIES[0], read(archive), archive / "suites")))
    split = [[entry.strip() for entry in row.split("|")[1:-1]] for row in rows if row.startswith("| ")]
    found = {claim: entries for claim, *entries in split}
    assert found["fedasmu over fedbuff: accuracy 0.68 % to 64.75 %"] == ["+40.5 %", "confirmed"]
    assert found["fedasmu over fedbuff: faster 11.17 % to 75.39 %"] == ["+100 %", "confirmed"], "fedbuff never does"
    assert found["fedasmu over fedasync: faster 11.42 % to 84.96 %"] == ["+50 %", "confirmed"]
    assert found["fedasmu over fedasync: accuracy 0.41 % to 58.93 %"] == ["-0.3 %", "not confirmed (tie)"]
    assert found["fedasmu over fedsa: faster 19.83 % to 67.54 %"] == ["not tested", "not tested"]
    assert {str(claim) for claim in CLAIMS} <= set(found)


def test_a_claim_run_in_one_cell_is_judged_there(archive, tmp_path):
    there = tmp_path / "none"
    both = former(StudyRuns(STUDIES[0], read(archive), archive), StudyRuns(STUDIES[1], read(there), there))
    assert answer(claim_of("fedasmu over fedbuff: accuracy"), both) == (
        ["+40.5 %", "not tested"],
        "confirmed where it was run",
    )


def test_figures_and_verdicts_use_the_seeds_that_both_have(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.5, 0.5)):
        write_run(tmp_path, "fedasmu", seed, [accuracy] * 61, 100.0)
    write_run(tmp_path / "suites" / "heterogeneity" / "ratio-110", "fedasmu", 0, [0.8] * 31)
    write_run(tmp_path / "suites" / "heterogeneity" / "ratio-110", "fedbuff", 0, [0.4] * 31)
    claim = claim_of("ratio 110, ratio 440: fedasmu over the baselines: accuracy")
    figures, said = answer(claim, former(StudyRuns(STUDIES[0], read(tmp_path), tmp_path / "suites")))
    assert figures == ["+100.0 %; not tested"] and said == "undecided (too few seeds)"


def test_a_target_reached_after_few_tests_answers_nothing(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for seed in range(3):
        write_run(one, "fedasmu", seed, [0.1] * 9 + [0.8] * 31, 900.0)
        write_run(other, "fedasmu", seed, [0.1] * 10 + [0.8] * 30, 1000.0)
        for folder in (one, other):
            write_run(folder, "port", seed, [0.1] * 20 + [0.8] * 20, 2000.0)
    claim = claim_of("fedasmu over port: faster")
    early, late = (StudyRuns(study, read(f), f) for study, f in zip(STUDIES, (one, other), strict=True))
    assert answer(claim, former(early)) == (["no resolution"], "no resolution")
    assert answer(claim, former(early, late)) == (["no resolution", "+50 %"], "confirmed where there is resolution")


def test_a_loss_counts_beside_a_cell_without_resolution(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "a", "fedasmu", seed, [0.1] * 2 + [0.8] * 38, 200.0)
        write_run(tmp_path / "a", "port", seed, [0.1] * 20 + [0.8] * 20, 2000.0)
        write_run(tmp_path / "b", "fedasmu", seed, [0.1] * 30 + [0.8] * 10, 3000.0)
        write_run(tmp_path / "b", "port", seed, [0.1] * 20 + [0.8] * 20, 2000.0)
    found = [StudyRuns(study, read(tmp_path / f), tmp_path) for study, f in zip(STUDIES, "ab", strict=True)]
    assert answer(claim_of("fedasmu over port: faster"), former(*found)) == (
        ["no resolution", "-50 %"],
        "not confirmed (loss)",
    )


def test_a_target_that_nobody_reaches_leaves_the_claim_undecided(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [0.1] * 40)
        write_run(tmp_path, "port", seed, [0.1] * 40)
    found = former(StudyRuns(STUDIES[0], read(tmp_path), tmp_path))
    assert answer(claim_of("fedasmu over port: faster"), found) == (["never"], "undecided (never)")


def test_the_summary_counts_the_verdicts_of_each_suite(archive):
    found = former(StudyRuns(STUDIES[0], read(archive), archive / "suites"))
    lines = claims_summary(found, "more.md")
    table = [[entry.strip() for entry in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert table[0] == ["suite", "confirmed", "not confirmed", "not tested"]
    assert table[1] == ["table", "3", "1", "16"], "over fedbuff twice, over fedasync in time; a tie in accuracy"
    assert table[-1][0] == "all" and sum(map(int, table[-1][1:])) == 51
    assert "(more.md#every-number-of-the-paper)" in lines[0]
    confirmed, refuted, untested = table[-1][1:]
    assert verdicts_sentence(found) == (
        f"Of the 51 numbers of the paper's evaluation, {confirmed} are confirmed, {refuted} are not confirmed "
        f"and {untested} are not tested."
    )


def test_the_sentence_says_none_is_confirmed(tmp_path):
    assert verdicts_sentence(new(tmp_path)) == (
        "Of the 51 numbers of the paper's evaluation, none is confirmed and 51 are not tested."
    )


# ---- ablation and slots


def test_runs_on_fashion_mnist_answer_no_claim_about_parts_and_slots(tmp_path):
    results, suites = tmp_path, tmp_path / "lenet-fmnist" / "suites"
    for seed in range(3):
        for method in ("fedasmu", "fedavg"):
            write_run(results / "lenet-fmnist", method, seed, [0.8] * 61)
        for method in ("fedasmu-da", "fedasmu-fa", "fedasmu-0"):
            write_run(suites / "ablation", method, seed, [0.5] * 31)
        for slot in ("h1", "h2", "h3"):
            write_run(suites / "slots", "fedasmu", seed, [0.5] * 31, options=f"slot = {slot!r}\n")
    found = Archive.read(results)
    parts = [claim for claim in CLAIMS if claim.suite in ("ablation", "slots")]
    assert len(parts) == 15
    assert {answer(claim, found)[1] for claim in parts} == {"not tested"}
    rows = [line for line in claims_summary(found, "more.md") if line.startswith(("| suite", "| ablation", "| slots"))]
    assert rows == ["| suite | confirmed | not tested |", "| ablation | 0 | 12 |", "| slots | 0 | 3 |"]


def test_the_new_world_answers_them_in_both_cells(tmp_path):
    lenet, cnn = tmp_path / "world-2" / "lenet-cifar10", tmp_path / "world-2" / "cnn-cifar10"
    finals = {"fedasmu": 0.60, "fedasmu-da": 0.50, "fedasmu-fa": 0.48, "fedasmu-0": 0.48, "fedavg": 0.25}
    tests = {"fedasmu": 10, "fedasmu-da": 9, "fedasmu-fa": 20, "fedasmu-0": 18, "fedavg": 20}
    write_ablation(lenet, finals | {"slot = h1": 0.5, "slot = h2": 0.6}, tests)
    write_ablation(cnn, finals | {"slot = h1": 0.4, "slot = h3": 0.7}, tests | {"fedasmu-fa": 9})
    found = new(tmp_path)
    said = {str(claim).rpartition(":")[0] + f", {claim.gain}": answer(claim, found) for claim in CLAIMS}
    assert said["ablation: fedasmu over fedasmu-da, accuracy"] == (["+20.0 %", "+20.0 %"], "confirmed")
    assert said["ablation: fedasmu over fedasmu-fa, time"] == (
        ["+50 %", "no resolution"],
        "confirmed where there is resolution",
    )
    assert said["ablation: fedasmu-da over fedasmu-0, time"] == (["no resolution"] * 2, "no resolution")
    assert said["ablation: fedasmu-fa over fedasmu-0, accuracy"] == (["+0.0 %", "+0.0 %"], "not confirmed (tie)")
    assert said["ablation: fedasmu-0 over fedavg, time"] == (["+100 %", "+100 %"], "confirmed"), "fedavg never does"
    assert said["slots: fedasmu over slot = h1, accuracy"] == (["+20.0 %", "+49.9 %"], "confirmed")
    assert said["slots: fedasmu over slot = h2, accuracy"] == (["+0.0 %", "not tested"], "not confirmed (tie)")
    assert said["slots: fedasmu over slot = h3, accuracy"][1] == "not confirmed (loss)"
