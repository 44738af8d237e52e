"""The paper's experiments as data: which cells, methods and settings, and every number of its evaluation, in words."""

from dataclasses import dataclass
from typing import Literal

from freshet.errors import ConfigError
from freshet.experiments.cells import CELLS, METHODS

#: What a suite's figure looks like: accuracy curves per cell; bars per setting and kind; bars per method and cell.
Look = Literal["curves", "settings", "methods"]
NAMES = (
    "names: fedasmu and fedssmu are the paper's methods, -published keeps its printed formulas where they are not the "
    "derivatives, -progress is ours"
)


@dataclass(frozen=True)
class Setting:
    """One value of what a suite varies."""

    name: str = ""
    devices: int | None = None
    ratio: float | None = None
    bandwidth: float = 1.0


@dataclass(frozen=True)
class Suite:
    """A named experiment of the paper."""

    name: str
    title: str
    cells: tuple[str, ...]
    methods: tuple[str, ...]
    look: Look
    settings: tuple[Setting, ...] = (Setting(),)
    #: What the paper says came out, in words; for ``table`` the numbers stand beside ours, too.
    published: tuple[str, ...] = ()


_LENET = ("lenet-fmnist",)
_SUITES = (
    Suite(
        "table",
        "the main table: twelve cells, twelve methods",
        tuple(CELLS),
        METHODS,
        "curves",
        published=(
            "FedASMU faster than FedAsync by 11.42 % to 84.96 %, PORT 18.22 % to 97.59 %, ASO-Fed 70.35 % to 93.77 %, "
            "FedBuff 11.17 % to 75.39 %, FedSA 19.83 % to 67.54 %",
            "FedASMU more accurate than FedAsync by 0.41 % to 58.93 %, PORT 0.68 % to 91.10 %, "
            "ASO-Fed 1.23 % to 103.82 %, FedBuff 0.68 % to 64.75 %, FedSA 1.97 % to 118.90 %",
            "FedSSMU faster than FedAvg, FedProx and MOON by 34.25 % to 85.92 %, FedDyn 20.80 % to 73.15 %, "
            "FedLWS 3.73 % to 54.86 %",
            "FedSSMU more accurate than FedAvg by 1.03 % to 133.04 %, FedProx 0.91 % to 145.87 %, "
            "MOON 0.91 % to 139.29 %, FedDyn 1.03 % to 79.06 %, FedLWS 1.03 % to 51.41 %",
            "both over all baselines: accuracy +0.41 % to +145.87 %, 3.73 % to 97.59 % faster",
        ),
    ),
    Suite(
        "devices",
        "number of devices",
        _LENET,
        METHODS,
        "settings",
        tuple(Setting(f"{count} devices", devices=count) for count in (100, 200, 250)),
        (
            "FedASMU: accuracy +0.49 % to +12.51 %, 19.83 % to 90.17 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +0.1 % to +13.38 %, 54.5 % to 91.32 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "heterogeneity",
        "slowest over fastest device",
        _LENET,
        METHODS,
        "settings",
        tuple(Setting(f"ratio {ratio:g}", ratio=ratio) for ratio in (5.0, 110.0, 440.0)),
        (
            "FedASMU: accuracy +4.65 % to +7.07 %, 7.12 % to 69.75 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +6.28 % to +12.38 %, 68.37 % to 79.44 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "bandwidth",
        "bandwidth of the devices",
        _LENET,
        METHODS,
        "settings",
        (
            Setting("bandwidth 1"),
            Setting("bandwidth 1/50", bandwidth=1 / 50),
            Setting("bandwidth 1/100", bandwidth=1 / 100),
        ),
        (
            "FedASMU: accuracy +3.3 % to +11.93 % at 1/50, +2.97 % to +12.38 % at 1/100; "
            "43.1 % to 87.3 % and 31.28 % to 85.66 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +1.15 % to +4.58 % at 1/50, +2.88 % to +6.1 % at 1/100; "
            "42.2 % to 51.82 % and 16.59 % to 81.78 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "ablation",
        "FedASMU without its parts",
        ("lenet-cifar10", "cnn-cifar10"),
        ("fedasmu", "fedasmu-da", "fedasmu-fa", "fedasmu-0", "fedavg"),
        "methods",
        published=(
            "FedASMU over -DA: accuracy +1.38 % to +4.32 %; over -FA: +1.75 % to +4.71 %, 44.77 % to 73.96 % faster",
            "-DA over -0: accuracy +1.04 % to +3.41 %, 15.71 % to 19.54 % faster; -FA over -0: +0.65 % to +3.04 %",
            "-DA and -FA over FedAvg: accuracy +0.73 % to +3.75 %, 72.88 % to 85.72 % faster",
            "-0 over FedAvg: accuracy +0.08 % to +0.34 %, 67.84 % to 82.26 % faster",
        ),
    ),
    Suite(
        "slots",
        "when to ask for the fresh model",
        ("lenet-cifar10",),
        ("fedasmu@slot=rl", "fedasmu@slot=h1", "fedasmu@slot=h2", "fedasmu@slot=h3"),
        "methods",
        published=("the learned slot over H1, H2, H3: accuracy +2.4 %, +2.2 %, +2.8 %",),
    ),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}


def find_suite(name: str) -> Suite:
    """The suite of this name."""
    if name not in SUITES:
        raise ConfigError("SUITE", f"{name!r} is not known; choose one of {', '.join(SUITES)}, theory, results")
    return SUITES[name]


# ---- where the paper contradicts its own table (erratum E12)

_SYNC = METHODS[7:]
#: Cells whose time of FedSSMU is printed in bold, as the shortest of the synchronous methods.
BOLD_TIMES = (
    "lenet-fmnist",
    "lenet-cifar10",
    "resnet-cifar100",
    "resnet-tiny",
    "alexnet-cifar10",
    "alexnet-cifar100",
    "vgg-cifar100",
)


def slower_cells() -> dict[str, str]:
    """Cells in which FedSSMU is not the fastest synchronous method, with the fastest one."""
    found = {}
    for name, cell in CELLS.items():
        times = {m: time for m in ("fedssmu", *_SYNC) if (time := cell.published[m].time) is not None}
        fastest = min(times, key=lambda method: times[method])
        if fastest != "fedssmu":
            found[name] = fastest
    return found


def less_accurate_cells() -> dict[str, str]:
    """Cells in which FedSSMU is not the most accurate synchronous method, with the most accurate one."""
    best = {name: max(("fedssmu", *_SYNC), key=lambda m: c.published[m].accuracy) for name, c in CELLS.items()}
    return {name: method for name, method in best.items() if method != "fedssmu"}


def contradictions() -> list[str]:
    """What the paper says of FedSSMU and its main table does not bear out, recomputed from the table."""
    slower, worse = slower_cells(), less_accurate_cells()
    by = ", ".join(f"{name} ({fastest})" for name, fastest in slower.items())
    notes = [
        "the paper says that FedSSMU has the highest accuracy and speed, and gives its gains in speed over the cells "
        f"with a gain only; by its own table FedSSMU is not the fastest in {len(slower)} of {len(CELLS)} cells: {by}"
    ]
    for name, method in worse.items():
        ours, theirs = (CELLS[name].published[m].accuracy for m in ("fedssmu", method))
        change = 100 * (ours / theirs - 1)
        notes.append(
            f"by its own table FedSSMU is less accurate than {method} on {name}: {ours:g} against {theirs:g} "
            f"({change:.1f} %)"
        )
    for name in BOLD_TIMES:
        if name in slower:
            bold, least = (CELLS[name].published[m].time for m in ("fedssmu", slower[name]))
            notes.append(
                f"the paper prints FedSSMU's time on {name} in bold, {bold:,g}, but {slower[name]} has {least:,g}"
            )
    return notes
