"""What the paper says in words: every number of its evaluation is there, and checked against its own table."""

import re

import pytest

from freshet.paper.cells import CELLS, METHODS
from freshet.paper.suites import (
    BOLD_TIMES,
    NAMES,
    SUITES,
    contradictions,
    find_suite,
    less_accurate_cells,
    plan,
    slower_cells,
)

from .test_cells import paper, table  # noqa: F401

SPELT = {"FedAsync": "fedasync", "PORT": "port", "ASO-Fed": "asofed", "FedBuff": "fedbuff", "FedSA": "fedsa"}
SPELT |= {"FedAvg": "fedavg", "FedProx": "fedprox", "MOON": "moon", "FedDyn": "feddyn", "FedLWS": "fedlws"}


def said(text):
    """The percentages in a text."""
    return set(re.findall(r"\d+\.\d+(?=\s*\}?\s*\\?%)", text))


def gains(lead, other):
    """Relative gains of accuracy, and savings of time, over all cells that have them."""
    pairs = [(cell.published[lead], cell.published[other]) for cell in CELLS.values()]
    accuracy = [100 * (a.accuracy / b.accuracy - 1) for a, b in pairs]
    time = [100 * (1 - a.time / b.time) for a, b in pairs if a.time is not None and b.time is not None]
    return accuracy, time


def test_every_number_of_the_papers_evaluation_is_said_by_a_suite(paper):  # noqa: F811
    start = paper.index(r"\subsubsection{Performance Overview}")
    ours = said(" ".join(sentence for suite in SUITES.values() for sentence in suite.published))
    theirs = said(paper[start : paper.index(r"\bibliographystyle")])
    assert len(theirs) > 60
    assert theirs == ours


def test_the_sentences_about_fedasmu_follow_from_the_table():
    faster, better = SUITES["table"].published[:2]
    for name, low, high in re.findall(r"([A-Z][\w-]+) (?:by )?([\d.]+) % to ([\d.]+) %", faster):
        time = gains("fedasmu", SPELT[name])[1]
        assert (round(min(time), 2), round(max(time), 2)) == (float(low), float(high)), name
    for name, low, high in re.findall(r"([A-Z][\w-]+) (?:by )?([\d.]+) % to ([\d.]+) %", better):
        accuracy = gains("fedasmu", SPELT[name])[0]
        assert (round(min(accuracy), 2), round(max(accuracy), 2)) == (float(low), float(high)), name


def test_the_sentences_about_fedssmu_leave_out_the_cells_without_a_gain():
    faster, better = SUITES["table"].published[2:4]
    ranges = dict(re.findall(r"([A-Z][\w-]+) (?:by )?([\d.]+ % to [\d.]+) %", faster))
    for name, text in ranges.items():
        low, high = map(float, text.split(" % to "))
        names = ("fedavg", "fedprox", "moon") if name == "MOON" else (SPELT[name],)
        time = [value for other in names for value in gains("fedssmu", other)[1]]
        assert (round(min(v for v in time if v > 0), 2), round(max(time), 2)) == (low, high), name
        assert min(time) < 0, "in some cells it is slower"
    for name, low, high in re.findall(r"([A-Z][\w-]+) (?:by )?([\d.]+) % to ([\d.]+) %", better):
        accuracy = gains("fedssmu", SPELT[name])[0]
        assert (round(min(v for v in accuracy if v > 0), 2), round(max(accuracy), 2)) == (float(low), float(high)), name


def test_erratum_e12_recomputed_from_the_table():
    sync = METHODS[6:]
    slower = {
        name
        for name, cell in CELLS.items()
        if any((t := cell.published[m].time) is not None and t < cell.published["fedssmu"].time for m in sync[1:])
    }
    assert len(slower) == 6 and slower == set(slower_cells())
    assert set(slower_cells().values()) == {"feddyn", "fedlws"}
    assert less_accurate_cells() == {"vgg-cifar10": "fedlws"}
    vgg = CELLS["vgg-cifar10"].published
    assert 100 * (vgg["fedssmu"].accuracy / vgg["fedlws"].accuracy - 1) == pytest.approx(-4.8, abs=0.05)
    assert [name for name in BOLD_TIMES if name in slower] == ["lenet-cifar10"], "one bold time is wrong"
    notes = " ".join(contradictions())
    assert "6 of 12 cells" in notes and "fedlws on vgg-cifar10" in notes and "63,500" in notes and "56,019" in notes


def test_the_bold_times_are_the_papers(paper):  # noqa: F811
    from .test_cells import clean, key, spread

    bold = []
    for part in table(paper, "tab:cmp_overall").split(r"\begin{tabular}")[1:]:
        rows = [re.sub(r"\\(?:midrule|toprule|bottomrule)", "", row) for row in part.split(r"\\")]
        headers = [spread(row) for row in rows if r"\multicolumn" in row]
        columns = [key(n, d) for n, d in zip(headers[0], headers[1], strict=True)]
        row = next(row for row in rows if row.strip().startswith(r"\SName"))
        for place, entry in enumerate(row.split("&")[1:]):
            if place % 2 == 1 and r"\textbf" in entry:
                bold.append(columns[place])
                assert float(clean(entry)) == CELLS[columns[place]].published["fedssmu"].time
    assert set(bold) == set(BOLD_TIMES)


def test_contradictions_stand_below_the_table_and_the_names_below_every_suite():
    notes = plan(find_suite("table"), [0], cells="lenet-fmnist", methods="fedssmu,fedavg").notes
    assert all(sentence in notes for sentence in contradictions())
    for name in SUITES:
        assert NAMES in plan(find_suite(name), [0], scale=0.02).notes
    assert "-progress is ours" in NAMES
