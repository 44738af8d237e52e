"""The sentences with numbers of the paper's evaluation, as data, and what runs of ours say to each.

A claim is a gain of one method over others, from ``least`` to ``most`` percent over the paper's cells or settings: of
accuracy relative to the rival's, or of time to the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Gain = Literal["accuracy", "time"]
#: How two methods compare over seeds: ``open`` where seeds disagree, ``few`` where there are too few of them, ``none``
#: where there is nothing to compare.
Outcome = Literal["win", "loss", "tie", "open", "few", "none"]
Verdict = Literal["confirmed", "not confirmed", "cannot be told"]
BASELINES = ("baselines",)


@dataclass(frozen=True)
class Claim:
    """``ours`` gains over each of ``rivals`` (all baselines of its kind: ``BASELINES``)."""

    suite: str
    ours: str
    rivals: tuple[str, ...]
    gain: Gain
    least: float
    most: float
    #: In which settings of the suite; every one if there are none.
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = {"table": ""}.get(self.suite, f"{', '.join(self.settings) or self.suite}: ")
        amount = f"{self.least:g} %" if self.least == self.most else f"{self.least:g} % to {self.most:g} %"
        rivals = "the baselines" if self.rivals == BASELINES else ", ".join(self.rivals)
        return f"{where}{self.ours} over {rivals}: {'accuracy' if self.gain == 'accuracy' else 'faster'} {amount}"


def _pairs(suite: str, ours: str, gains: dict[str, tuple[tuple[float, float], tuple[float, float]]]) -> Iterator[Claim]:
    """Per rival the gain of time, then that of accuracy."""
    for rival, (time, accuracy) in gains.items():
        yield Claim(suite, ours, (rival,), "time", *time)
        yield Claim(suite, ours, (rival,), "accuracy", *accuracy)


def _settings(suite: str, settings: tuple[str, ...], *gains: tuple[float, float]) -> Iterator[Claim]:
    """Accuracy and time of FedASMU, then of FedSSMU, over the baselines."""
    names = (("fedasmu", "accuracy"), ("fedasmu", "time"), ("fedssmu", "accuracy"), ("fedssmu", "time"))
    for (ours, gain), amount in zip(names, gains, strict=True):
        yield Claim(suite, ours, BASELINES, gain, *amount, settings)  # type: ignore[arg-type]


CLAIMS: tuple[Claim, ...] = (
    *_pairs(
        "table",
        "fedasmu",
        {
            "fedasync": ((11.42, 84.96), (0.41, 58.93)),
            "port": ((18.22, 97.59), (0.68, 91.10)),
            "asofed": ((70.35, 93.77), (1.23, 103.82)),
            "fedbuff": ((11.17, 75.39), (0.68, 64.75)),
            "fedsa": ((19.83, 67.54), (1.97, 118.90)),
        },
    ),
    *_pairs(
        "table",
        "fedssmu",
        {
            "fedavg": ((34.25, 85.92), (1.03, 133.04)),
            "fedprox": ((34.25, 85.92), (0.91, 145.87)),
            "moon": ((34.25, 85.92), (0.91, 139.29)),
            "feddyn": ((20.80, 73.15), (1.03, 79.06)),
            "fedlws": ((3.73, 54.86), (1.03, 51.41)),
        },
    ),
    Claim("ablation", "fedasmu", ("fedasmu-da",), "accuracy", 1.38, 4.32),
    Claim("ablation", "fedasmu", ("fedasmu-fa",), "accuracy", 1.75, 4.71),
    Claim("ablation", "fedasmu", ("fedasmu-fa",), "time", 44.77, 73.96),
    Claim("ablation", "fedasmu-da", ("fedasmu-0",), "accuracy", 1.04, 3.41),
    Claim("ablation", "fedasmu-da", ("fedasmu-0",), "time", 15.71, 19.54),
    Claim("ablation", "fedasmu-fa", ("fedasmu-0",), "accuracy", 0.65, 3.04),
    Claim("ablation", "fedasmu-da", ("fedavg",), "accuracy", 0.73, 3.75),
    Claim("ablation", "fedasmu-da", ("fedavg",), "time", 72.88, 85.72),
    Claim("ablation", "fedasmu-fa", ("fedavg",), "accuracy", 0.73, 3.75),
    Claim("ablation", "fedasmu-fa", ("fedavg",), "time", 72.88, 85.72),
    Claim("ablation", "fedasmu-0", ("fedavg",), "accuracy", 0.08, 0.34),
    Claim("ablation", "fedasmu-0", ("fedavg",), "time", 67.84, 82.26),
    Claim("slots", "fedasmu", ("slot = h1",), "accuracy", 2.4, 2.4),
    Claim("slots", "fedasmu", ("slot = h2",), "accuracy", 2.2, 2.2),
    Claim("slots", "fedasmu", ("slot = h3",), "accuracy", 2.8, 2.8),
    *_settings(
        "devices",
        ("100 devices", "200 devices", "250 devices"),
        (0.49, 12.51),
        (19.83, 90.17),
        (0.1, 13.38),
        (54.5, 91.32),
    ),
    *_settings("heterogeneity", ("ratio 110", "ratio 440"), (4.65, 7.07), (7.12, 69.75), (6.28, 12.38), (68.37, 79.44)),
    *_settings("bandwidth", ("bandwidth 1/50",), (3.3, 11.93), (43.1, 87.3), (1.15, 4.58), (42.2, 51.82)),
    *_settings("bandwidth", ("bandwidth 1/100",), (2.97, 12.38), (31.28, 85.66), (2.88, 6.1), (16.59, 81.78)),
)


def compare(ours: Sequence[float], theirs: Sequence[float], least: float = 0.0) -> Outcome:
    """Paired values of the same seeds, more being better: a win needs medians more than ``least`` apart and every seed
    on its side."""
    if not ours:
        return "none"
    middle = median(ours) - median(theirs)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if abs(middle) < least or middle == 0.0:
        return "tie"
    if all(difference > 0 for difference in differences):
        return "win"
    return "loss" if all(difference < 0 for difference in differences) else "open"


def verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """What the outcomes against all rivals in all settings of a claim say to it."""
    if any(outcome in ("loss", "tie") for outcome in outcomes):
        return "not confirmed"
    return "confirmed" if outcomes and all(outcome == "win" for outcome in outcomes) else "cannot be told"
