"""``fedasmu`` and ``fedssmu`` are the paper's methods; the names of variants say what differs."""

import numpy as np
import pytest

from freshet.core.method import MethodContext
from freshet.errors import ConfigError
from freshet.experiments.tune import space_for
from freshet.methods import class_and_preset, method_options
from freshet.paper.cells import CELLS, cell_tables
from tests.methods.asmu_helpers import plain_layout

#: The paper's method: its server rule and its device rule, both learned, with derivatives that are derivatives, and
#: with the slot selector as printed.
PAPERS = {
    "apply": "mix",
    "equations": "corrected",
    "selector": "printed",
    "controls": "loss",
    "judge": "own",
    "local_work": "steps",
    "probe": "batch",
    "distance": False,
    "slot": "rl",
    "merge": "mix",
    "beta": "learned",
    "refresh": 1,
    "push_after": 0,
    "dynamic_server": True,
    "adaptive_device": True,
    "control_memory": "exact",
    "meta_from": "shipped",
    "tau_max": 99,
    "eta_rl": 0.001,
}


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_name_without_suffix_is_the_papers_method(name: str) -> None:
    options = method_options(name, {})
    assert {key: getattr(options, key) for key in PAPERS} == PAPERS


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
@pytest.mark.parametrize(
    ("suffix", "differs"),
    [
        ("-da", {"dynamic_server": False}),
        ("-fa", {"adaptive_device": False}),
        ("-0", {"dynamic_server": False, "adaptive_device": False}),
        ("-published", {"equations": "published"}),
        ("-progress", {"apply": "progress", "selector": "shaped", "meta_from": "none"}),
        (
            "-course",
            {"apply": "progress", "selector": "shaped", "meta_from": "none", "controls": "course"},
        ),
        (
            "-fresh",
            {
                "apply": "progress",
                "selector": "shaped",
                "meta_from": "none",
                "controls": "course",
                "merge": "rebase",
                "beta": 1.0,
                "slot": "last",
            },
        ),
    ],
)
def test_variant_differs_in_what_its_name_says(name: str, suffix: str, differs: dict[str, object]) -> None:
    options = method_options(name + suffix, {})
    assert {key: getattr(options, key) for key in PAPERS} == PAPERS | differs
    assert class_and_preset(name + suffix)[0] is class_and_preset(name)[0]


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_initial_controls_depend_on_apply_by_default(name: str) -> None:
    mix, progress = method_options(name, {}), method_options(f"{name}-progress", {})
    assert (mix.lambda0, mix.iota0) != (progress.lambda0, progress.iota0)
    assert method_options(f"{name}-progress", {"lambda0": 7.0}).lambda0 == 7.0


@pytest.mark.parametrize("name", ["fedasmu-published", "fedssmu-published"])
def test_published_sigma_starts_where_its_printed_derivative_is_not_zero(name: str) -> None:
    assert method_options(name, {}).sigma0 not in (0.0, 1.0), "ln(sigma) would be 0 or undefined for ever"


@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
def test_cell_uses_the_papers_rates(cell) -> None:
    method = cell_tables(cell, "fedasmu")["method"]
    assert method["eta_lambda"] == cell.eta_lambda and method["eta_upsilon"] == cell.eta_upsilon
    assert {"apply", "equations", "control_memory"}.isdisjoint(method), "a cell changes rates, not the method"


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_settings_of_runs_before_the_selector_are_still_read(name: str) -> None:
    options = method_options(name, {"advantage": "scaled", "meta_from": ""})
    assert (options.selector, options.meta_from) == ("shaped", "none")
    with pytest.raises(ConfigError, match=r"no longer exists; selector = .printed."):
        method_options(name, {"advantage": "raw"})


@pytest.mark.parametrize(("epochs", "expected"), [(5, 0), (3, 1)])
def test_run_says_that_the_shipped_meta_model_does_not_fit(epochs: int, expected: int) -> None:
    context = MethodContext(4, np.full(4, 10, np.int64), epochs, 2, plain_layout(6), seed=0)
    found = [
        class_and_preset(name)[0](method_options(name, {}), context).notices() for name in ("fedasmu", "fedasmu-fa")
    ]
    assert [len(notices) for notices in found] == [expected, 0]
    assert (
        not expected or "the shipped meta model is for 5 epochs, trips have up to 3: it starts untrained" in found[0][0]
    )


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_options_that_a_rebase_does_not_use_are_not_tuned(name: str) -> None:
    assert {"method.gamma0", "method.upsilon0"} <= space_for(f"{name}-course").keys()
    assert space_for(f"{name}-fresh").keys() == {"training.lr", "method.lambda0", "method.sigma0", "method.iota0"}
