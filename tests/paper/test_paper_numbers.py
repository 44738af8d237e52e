"""The page "What the paper's numbers imply" against its script, and the script against independent computations."""

import re
from bisect import bisect_right
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scripts import paper_numbers as script

from freshet.config import resolve
from freshet.models.registry import build
from freshet.paper.cells import CELLS, FASTEST, IN_FLIGHT, METHODS, cell_tables

PAGE = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs" / "paper-numbers.md").read_text(encoding="utf-8"))
SPELT = {"lenet": "LeNet", "cnn": "CNN", "resnet": "ResNet", "alexnet": "AlexNet", "vgg": "VGG", "textcnn": "TextCNN"}
SPELT |= {"fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny": "Tiny ImageNet"}
SPELT |= {"imdb": "IMDb", "fedavg": "FedAvg", "fedlws": "FedLWS", "fedbuff": "FedBuff"}


def spelt(cell: str) -> str:
    return " / ".join(SPELT[part] for part in cell.split("-"))


def test_the_page_counts_the_times():
    times = {kind: [c.published[m].time for c in CELLS.values() for m in kind] for kind in (METHODS[:6], METHODS[6:])}
    found = [sum(time is not None for time in column) for column in times.values()]
    assert found == [len(script.published(METHODS[:6])), len(script.published(METHODS[6:]))]
    assert f"{found[1]} synchronous and {found[0]} asynchronous times" in PAGE


def test_three_times_are_equal_in_cells_with_different_networks():
    found = script.equal_times()
    assert sorted(found) == [27_672, 56_019, 125_514]
    for time, group in found.items():
        row = next(row for row in re.findall(r"\| ([\d,]+) s \|([^|]+)\|", PAGE) if row[0] == f"{time:,.0f}")
        for cell, method, _ in group:
            assert CELLS[cell].published[method].time == time
            assert spelt(cell) in row[1] and SPELT[method] in row[1]


def test_what_transfers_would_cost():
    def by_hand(model, channels, size):
        network = build(model, input_shape=(channels, size, size), classes=10)
        bits = 32 * sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
        return bits / 10e6 + bits / 50e6

    lenet, alexnet = script.transfer_seconds("lenet-cifar10"), script.transfer_seconds("alexnet-cifar10")
    assert (lenet, alexnet) == pytest.approx((by_hand("lenet5", 3, 32), by_hand("alexnet", 3, 32)))
    assert f"LeNet takes {lenet:.2f} s to go down and up, and AlexNet {alexnet:.2f} s" in PAGE
    rounds = 125_514 // script.least_round()[1]
    difference = round(rounds * (alexnet - lenet), -1)
    assert f"After {rounds:.0f} rounds" in PAGE and f"would differ by about {difference:,.0f} s" in PAGE
    slow = script.transfer_seconds("lenet-fmnist", 0.1, 0.5)
    assert slow == pytest.approx(100 * by_hand("lenet5", 1, 28))
    assert f"At 1/100 a LeNet takes {slow:.1f} s down and up, beside 190 to 950 s of training" in PAGE


def test_the_length_of_a_round_and_the_fastest_device():
    (cell, method, time), seconds = script.least_round()
    assert (cell, method) == ("lenet-cifar10", "moon")
    assert time == max(c.published[m].time or 0 for c in CELLS.values() for m in METHODS[6:])
    factor = script.slowest_of(10, 5.0)
    draws = np.random.default_rng(1).uniform(1.0, 5.0, (200_000, 10)).max(axis=1)
    assert factor == pytest.approx(draws.mean(), abs=4 * draws.std() / np.sqrt(len(draws)))
    assert seconds / factor < FASTEST < 1.01 * seconds / factor
    assert f"The longest synchronous time is {time:,.0f} s (MOON, LeNet / CIFAR-10)" in PAGE
    assert f"{time:,.0f} / 500 = {seconds:.0f} s" in PAGE and f"A round lasts at least {seconds:.0f} s" in PAGE
    assert f"4f x 10/11 = {factor:.2f} f" in PAGE and f"is at least {seconds / factor:.0f} s" in PAGE
    run = resolve(cell_tables(CELLS["lenet-cifar10"], "fedavg")).run
    assert f"lasts {run.eval_every:g} s on average, and a run of 500 rounds {run.until:,.0f} s" in PAGE


def test_times_beyond_the_end_of_a_run():
    (few, count), (none, _) = script.beyond_the_end(10.0), script.beyond_the_end(FASTEST)
    end = 500 * 10 * (1 + 4 * 10 / 11)
    assert few == sum((c.published[m].time or 0) > end for c in CELLS.values() for m in METHODS[6:])
    assert f"With f = 10 s, {few} of the {count} synchronous times" in PAGE
    assert none == 0 and f"With f = {FASTEST:g} s none does" in PAGE


def test_rounds_do_not_count_uploads():
    asmu, aso = (CELLS["vgg-cifar100"].published[m].time for m in ("fedasmu", "asofed"))
    assert aso == script.published(METHODS[:6])[-1][2]
    assert f"FedASMU's {asmu:,} s on VGG / CIFAR-100 would then be at least {asmu / 500:.0f} s per upload" in PAGE
    assert f"ASO-Fed's {aso:,} s at least {aso / 500:.0f} s" in PAGE
    assert f"FedAvg has an upload every {script.least_round()[1] / 10:.0f} s" in PAGE


def test_gaps_between_synchronous_times_of_one_cell():
    gaps = set()
    for cell in CELLS.values():
        times = sorted(cell.published[m].time for m in METHODS[7:] if cell.published[m].time is not None)
        gaps |= {later - earlier for earlier, later in pairwise(times)}
    assert {1_189, 1_286, 1_444} <= gaps and "1,189, 1,286 or 1,444 s apart" in PAGE
    assert {CELLS["lenet-fmnist"].published[m].time for m in ("fedavg", "fedprox", "moon")} == {97_692}
    assert "97,692 s" in PAGE


def test_ratios_to_fedavg_and_the_limit():
    found, factor = script.speedups(), script.slowest_of(10, 5.0)
    assert len(found) == 11
    for cell, ratio in found.items():
        assert f"{spelt(cell)} | {ratio:.1f} |" in PAGE
    assert f"{sum(ratio > factor for ratio in found.values())} of {len(found)} exceed the limit" in PAGE
    assert f"at most {factor:.2f} times as fast as FedAvg" in PAGE and f"n per {factor:.2f} f seconds" in PAGE


def test_a_gain_in_time_as_a_ratio():
    low, high = (1 / (1 - gain) for gain in (0.6784, 0.8226))
    assert f"67.84 % to 82.26 % faster than FedAvg, which is {low:.1f} to {high:.1f} times as fast" in PAGE


def test_no_chain_of_trips_exceeds_the_speed_limit():
    """Random trips, half of them with a merge: a model at time t has at most n t / f steps behind it, or nearly so."""
    rng, n, fastest = np.random.default_rng(2), 5, 1.0
    seconds = np.append(fastest, rng.uniform(1.0, 5.0, 9))
    times, depths = [0.0], [0.0]  # of the global model
    flying = sorted((seconds[device], device, 0.0) for device in range(10))
    for _ in range(5000):
        time, device, base = heappop(flying)
        left = int(rng.integers(1, n + 1))  # steps after the merge
        merged = depths[bisect_right(times, time - seconds[device] * left / n) - 1] if rng.random() < 0.5 else 0.0
        upload = max(base + n, merged + left)
        times.append(time)
        depths.append(max(depths[-1], upload))
        assert depths[-1] <= n * time / fastest + 1e-9
        heappush(flying, (time + seconds[device], device, depths[-1]))
    assert depths[-1] > 0.9 * n * times[-1] / fastest


def test_the_settings_of_the_cells_are_those_of_the_page():
    tables = cell_tables(CELLS["lenet-cifar10"], "fedasmu")
    fleet, run = tables["fleet"], tables["run"]
    assert f"`fleet.fastest = {fleet['fastest']:g}`" in PAGE and f"`run.in_flight = {run['in_flight']}`" in PAGE
    assert run["in_flight"] == IN_FLIGHT and not any(fleet[key] for key in ("up_mbps", "down_mbps", "up_latency"))
    assert f"`lr 0.999^(t / {tables['training']['schedule_seconds']:g})`" in PAGE
    assert f"0.999^500 = {0.999**500:.2f}" in PAGE and f"would end at {0.999 ** (5.4 * 500):.2f} of it" in PAGE


def test_devices_in_flight_as_on_the_page():
    """A short run of the simulation that fills the page's table."""
    found = script.simulate(IN_FLIGHT, rounds=10)
    row = re.search(r"\| 30 \| (\d+) \| (\d+) \| 0 \| 0 \| ([\d.]+) \|", PAGE)
    assert row is not None
    flying, staleness, uploads = map(float, row.groups())
    assert found["in flight"] == pytest.approx(flying, abs=1.0)
    assert found["staleness"] == pytest.approx(staleness, abs=2.0)
    assert found["uploads over FedAvg's"] == pytest.approx(uploads, rel=0.06)
    assert found["discarded"] == found["never heard"] == 0.0
