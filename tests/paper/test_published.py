"""The paper's numbers stand beside exactly the paper's configuration; its sentences agree with its own table."""

import json
import re

import pytest
import tomli_w

from freshet.config import resolve
from freshet.experiments import compare
from freshet.experiments.grid import Scenario, UserSettings, expand, parse_entries
from freshet.paper.cells import CELLS, METHODS, cell_scenario, cell_tables
from freshet.paper.published import (
    BOLD_TIMES,
    contradictions,
    less_accurate_cells,
    published_numbers,
    slower_cells,
)
from freshet.paper.suites import NAMES, SUITES, plan

from .test_cells import clean, key, paper, spread, table  # noqa: F401

CELL = "lenet-fmnist"
BARE_CELL = cell_scenario(CELLS[CELL])
OVERRIDES = [
    "fleet.devices=99",
    "fleet.ratio=6.0",
    "fleet.fastest=9.0",
    "fleet.up_mbps=9.0",
    "fleet.down_latency=0.06",
    "fleet.loss=0.01",
    "training.lr=0.006",
    "training.lr_decay=1.0",
    "training.schedule_by=rounds",
    "training.schedule_seconds=100.0",
    "training.optimiser=adam",
    "training.epochs=4",
    "training.batch_size=10",
    "training.momentum=0.9",
    "training.augment=true",
    "data.concentration=0.3",
    "data.min_samples=6",
    "data.partition=iid",
    "data.train_samples=600",
    "data.test_samples=100",
    "data.validation=0.1",
    "data.name=cifar10",
    "model.name=mlp",
    "model.norm=group",
    "model.head=true",
    "run.per_round=3",
    "run.period=5.0",
    "run.in_flight=20",
    "run.trigger=concurrency",
    "run.until=600",
    "run.eval_every=10.0",
    "run.target=0.5",
    "fedasmu.lambda0=50",
    "fedasmu.sigma0=0.1",
    "fedasmu.gamma0=2.0",
    "fedasmu.eta_iota=0.1",
    "fedasmu.tau_max=9",
    "fedasmu.epsilon=0.0",
    "fedasmu.slot=h1",
    "fedasmu.apply=progress",
    "fedasmu.equations=published",
    "fedasmu.control_memory=sketch",
]
HARMLESS = [
    "run.executor=serial",
    "run.workers=3",
    "run.checkpoint_every=60.0",
    "run.checkpoint_minutes=1.0",
    "run.device_memory_mb=64",
    "data.dir=/somewhere",
    "training.lr=0.005",
    "fedasmu.lambda0=10.0",
]


def numbers(methods="fedasmu", settings=(), scenario=BARE_CELL, seeds=(0,), **given):
    jobs = expand(parse_entries(methods), seeds, UserSettings(settings=settings, **given), [scenario])
    found = published_numbers(jobs)
    return {job.entry.label: found.get(job.key) for job in jobs}


def test_every_method_of_the_table_has_its_number_in_the_plain_cell():
    for cell in CELLS.values():
        found = numbers(",".join(METHODS), scenario=cell_scenario(cell), seeds=(3,))
        assert {m: n["accuracy"] for m, n in found.items()} == {m: p.accuracy for m, p in cell.published.items()}


def test_the_printed_formulas_have_the_papers_numbers_and_our_own_have_none():
    found = numbers(
        "fedasmu,fedasmu-published,fedssmu-published,fedasmu-progress,fedssmu-progress,fedasmu-da,fedasmu-0"
    )
    assert found["fedasmu"] == found["fedasmu-published"] == {"accuracy": 0.858, "time": 11_603}
    assert found["fedssmu-published"] == {"accuracy": 0.858, "time": 13_753}
    rest = ("fedasmu-progress", "fedssmu-progress", "fedasmu-da", "fedasmu-0")
    assert [found[name] for name in rest] == [None] * 4, "of the ablations the paper has no absolute numbers"


@pytest.mark.parametrize("setting", OVERRIDES)
def test_an_override_that_changes_results_removes_the_number(setting):
    assert numbers(settings=[setting]) == {"fedasmu": None}


@pytest.mark.parametrize("setting", HARMLESS)
def test_an_override_that_changes_nothing_keeps_it(setting):
    assert numbers(settings=[setting])["fedasmu"] is not None


def test_options_of_an_entry_remove_it():
    found = numbers("fedasmu,fedasmu@lambda0=50,fedasmu@slot=h1,fedasmu@slot=rl,fedbuff,fedbuff@K=5")
    assert found["fedasmu"] == found["fedasmu@slot=rl"] is not None, "rl is what it does anyway"
    assert found["fedbuff"] is not None
    assert found["fedasmu@lambda0=50"] is found["fedasmu@slot=h1"] is found["fedbuff@K=5"] is None


def test_tuned_settings_remove_it_for_the_tuned_method():
    tuned = resolve({"method": {"name": "fedasmu", "lambda0": 2.0}, "training": {"lr": 0.01}}).tables()
    found = numbers("fedasmu,fedavg", tuned=[tuned])
    assert found["fedasmu"] is None and found["fedavg"] is not None


def test_a_config_file_removes_it_unless_it_equals_the_cell():
    assert numbers(tables={"fleet": {"ratio": 7.0}})["fedasmu"] is None
    whole = resolve(cell_tables(CELLS[CELL], "fedasmu")).tables()
    assert numbers(tables=whole)["fedasmu"] is not None


def test_a_scenario_without_a_cell_has_no_number():
    assert numbers(scenario=Scenario()) == {"fedasmu": None}


@pytest.mark.parametrize("scale", [0.02, 0.5, 0.999])
def test_a_scaled_suite_has_none(scale):
    assert plan(SUITES["table"], [0], scale=scale, cells=CELL).published == {}


def test_the_bandwidth_study_has_none_because_links_cost_no_time_in_the_table():
    assert plan(SUITES["bandwidth"], [0]).published == {}


@pytest.mark.parametrize("suite", ["devices", "heterogeneity"])
def test_a_study_has_them_in_its_normal_setting_alone(suite):
    found, planned = {}, plan(SUITES[suite], [0])
    for job in planned.jobs:
        found.setdefault(job.scenario.name, []).append(job.key in planned.published)
    assert [all(there) for there in found.values()] == [True, False, False]
    assert not any(any(there) for there in list(found.values())[1:])


# ---- as a user meets it


@pytest.fixture
def quick(monkeypatch):
    def nothing(job, *rest):
        raise RuntimeError("no time")

    monkeypatch.setattr(compare, "execute", nothing)


def shown(command, tmp_path, *words):
    command(*words)
    suite = words[0] == "paper"
    folder = tmp_path / "runs" / ("paper" if suite else "compare")
    record = json.loads(next(folder.glob("*.json")).read_text())
    return {line["label"]: line["published"] for world in record["worlds"] for line in world["lines"]}


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ((), True),
        (("--executor", "serial"), True),
        (("--seeds", "1"), True),
        (("--until", "600s"), False),
        (("--target", "0.6"), False),
        (("-s", "training.lr=0.1"), False),
        (("-s", "fedasmu.lambda0=50"), False),
        (("-s", "run.per_round=3"), False),
    ],
)
def test_compare_with_a_cell(command, quick, tmp_path, words, there):
    found = shown(command, tmp_path, "compare", "-m", "fedasmu", "--cell", CELL, "--seeds", "1", *words)
    assert (found["fedasmu"] is not None) is there


def test_compare_with_tuned_settings(command, quick, tmp_path):
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "best.toml").write_text(tomli_w.dumps({"method": {"name": "fedasmu"}, "training": {"lr": 0.02}}))
    budget = {"trials": 1, "seeds": 1, "until": 1}
    (folder / "tuning.json").write_text(json.dumps({"method": "fedasmu", "budget": budget}))
    words = ("compare", "-m", "fedasmu", "--cell", CELL, "--seeds", "1", "--tuned", str(folder))
    assert shown(command, tmp_path, *words) == {"fedasmu": None}


@pytest.mark.parametrize(
    ("words", "there"), [((), True), (("--scale", "0.02"), False), (("-s", "fedasmu.sigma0=0.2"), False)]
)
def test_the_papers_table(command, quick, tmp_path, words, there):
    found = shown(command, tmp_path, "paper", "table", "--cells", CELL, "-m", "fedasmu,fedasmu-progress", *words)
    assert (found["fedasmu"] is not None) is there
    assert found["fedasmu-progress"] is None


# ---- the paper's sentences


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


def test_every_number_of_the_papers_evaluation_is_in_a_suite(paper):  # noqa: F811
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
    notes = plan(SUITES["table"], [0], cells="lenet-fmnist", methods="fedssmu,fedavg").notes
    assert all(sentence in notes for sentence in contradictions())
    for name in SUITES:
        assert NAMES in plan(SUITES[name], [0], scale=0.02).notes
    assert "-progress is ours" in NAMES
