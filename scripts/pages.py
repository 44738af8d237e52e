"""Write the pages of docs/ that come from the code: ``python scripts/pages.py``.

docs/configuration.md comes from the settings, docs/cli.md from the commands, docs/events.md from the event kinds,
docs/equations.md from the docstrings of the methods, and the tables in docs/data.md from the catalogue.
"""

import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from typer.main import get_command

from freshet.cli.app import app
from freshet.core.events import KINDS, Contribution
from freshet.data.catalogue import CATALOGUE, Format, Spec
from freshet.methods import registry

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"

# ---- the command line

CLI_HEAD = """# Command line

`freshet --help` prints the same. `--debug`, anywhere on the line, shows the traceback of an error.
`scripts/pages.py` writes this page from the code.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | part of a grid failed, or an audit found a problem |
| 2 | an error; one sentence says what is wrong |
| 3 | an audit found no problem but could not check the weights of some run ("not audited") |
| 130 | interrupted |
"""


def cli() -> str:
    root: Any = get_command(app)
    parts = [CLI_HEAD, index(root)]
    parts += [command(words, found) for words, found in commands(root)]
    return "\n".join(parts)


def commands(root: Any, before: tuple[str, ...] = ("freshet",)) -> list[tuple[tuple[str, ...], Any]]:
    """Return all commands, also those of groups, with the words that call them."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, each in root.commands.items():
        words = (*before, name)
        found += commands(each, words) if hasattr(each, "commands") else [(words, each)]
    return found


def index(root: Any) -> str:
    rows = ["| command | |", "|---|---|"]
    for words, each in commands(root):
        call = " ".join(words)
        rows.append(f"| [`{call}`](#{'-'.join(words)}) | {sentence(each.help or '')} |")
    return "\n".join(rows) + "\n"


def command(words: tuple[str, ...], found: Any) -> str:
    arguments = [each for each in found.params if each.param_type_name == "argument"]
    options = [each for each in found.params if each.param_type_name == "option"]
    call = " ".join([*words, *(shape(each) for each in arguments)])
    lines = [f"## {' '.join(words)}", "", f"`{call}{' [OPTIONS]' if options else ''}`", "", prose(found.help or ""), ""]
    if arguments or options:
        lines += ["| | | default |", "|---|---|---|"]
        said = annotations(found)
        lines += [f"| `{shape(each)}` | {prose(said[each.name].__metadata__[0].help or '')} | |" for each in arguments]
        lines += [f"| {names(each)} | {prose(each.help or '')} | {default(each)} |" for each in options]
        lines.append("")
    return "\n".join(lines)


def annotations(found: Any) -> dict[str, Any]:
    """Return the annotations of a command's function: not all versions of typer keep the help of arguments."""
    return get_type_hints(inspect.unwrap(found.callback), include_extras=True)


def shape(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    many = "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value in ((), []) or callable(value) or "UNSET" in repr(value).upper():
        return ""
    return f"`{value}`"


def prose(text: str) -> str:
    """Turn help text into markdown: no screen markup, and escaped table separators."""
    plain = re.sub(r"\[/?(b|i|dim)\]", "`", inspect.cleandoc(text))
    plain = re.sub(r"^Example: (.*)$", r"Example: `\1`", plain, flags=re.MULTILINE)
    return plain.replace("|", r"\|")


def sentence(text: str) -> str:
    return prose(text).split("\n\n")[0].replace("\n", " ")


# ---- events

EVENTS_HEAD = """# Events

The lines of `events.jsonl`. Every event has `seq` (1, 2, 3, ...), `time` (seconds), `kind`, and the keys of its kind.
An optional key is absent if it has no value. *and more* stands for numbers of the method or the test.
[Run directory](run-directory.md#events) explains the keys. `scripts/pages.py` writes this page from `core/events.py`.
"""
TYPES = {int: "integer", float: "number", str: "string"}


def events() -> str:
    parts = [EVENTS_HEAD]
    for kind, found in KINDS.items():
        parts.append(f"## {kind}\n\n{prose(found.__doc__ or '').replace('``', '`')}\n\n{keys(found)}\n")
    parts.append(f"## A contribution\n\n{Contribution.__doc__}\n\n{keys(Contribution)}\n")
    return "\n".join(parts)


def keys(found: Any) -> str:
    rows = ["| key | type | |", "|---|---|---|"]
    for name, hint in found.__annotations__.items():
        if name == "numbers":
            rows.append("| *and more* | | |")
            continue
        optional = "optional" if name in found._field_defaults else ""
        rows.append(f"| `{name}` | {typed(hint)} | {optional} |")
    return "\n".join(rows)


def typed(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join("null" if part is type(None) else TYPES[part] for part in get_args(hint))
    return TYPES.get(hint, "list of [contributions](#a-contribution)")


# ---- methods

EQUATIONS_HEAD = """# Methods, one by one

What each method computes, which decisions are ours ([D]), and which independent implementations it agrees with.
`scripts/pages.py` makes this page from the docstrings of the methods' files (`src/freshet/methods/`).
Options with their defaults: [Configuration](configuration.md#method).

**How the agreement was measured** (version 0.1.0): digits, a tanh MLP 64-32-16-10, six label-skewed shards of 39 to
401 samples. The other implementation starts from Freshet's initial weights and follows its event log and its order of
batches. The figure is the largest difference over all global versions, `max |dw| / max |w - w0|`. Synchronous methods
ran 9 to 16 rounds, asynchronous ones 34 to 103 versions with a staleness of up to 14. Numbers around 1e-6 are rounding.
SCAFFOLD, FedNova, FedOpt, CA2FL and FADAS came later: `benchmarks/peers/agreement.py` repeats the comparison with flgo
for the first three. Of the newer rivals, the public update rule was transcribed and run where a figure is given.
The test suite also compares every method with an independent twin (`tests/twins/`). Of 31 deliberate
faults in the source, the twins caught 27 and other tests three. Nothing caught one, the order of weight decay in
ASO-Fed.
"""
#: Comparison with other people's code, by method: implementation, difference, remark.
AGREES = {
    "fedavg": (
        "the official repositories of FedDyn, MOON and FedProx (TensorFlow); flgo 0.4.4, fluke 0.8.1: at most 1.4e-6. "
        "flwr 1.41.0 (with BatchNorm): 3.2e-6."
    ),
    "ditto": "no other implementation was compared; a twin in float64 agrees to 3e-6.",
    "fedrep": "no other implementation was compared; a twin in float64 agrees to 2e-5 after three rounds.",
    "fedprox": (
        "the official code in TensorFlow, `drop` included; the repositories of FedDyn and MOON; flgo, fluke: 3e-7 to "
        "1.6e-6 (FedAvg in its place: 0.18)."
    ),
    "moon": (
        "the official code; flgo, fluke: 7e-7 to 1.3e-6 (FedAvg in its place: 0.56). The official code contrasts "
        "new devices with an untrained network; Freshet, flgo and fluke do not."
    ),
    "feddyn": (
        "the official code; flgo (equal shards): 3e-7 to 1e-6 (FedAvg in its place: 0.84). The authors clip gradients "
        "at norm 10, we do not (3 of 2,280 steps, 3.4e-3). fluke has the dual's sign and scale wrong (0.86 to 1.7). "
        "With its own shuffling, 3 seeds and 20 rounds, the official code's accuracy differs by 0.008 to 0.012 on "
        "average, where seeds differ by 0.03 to 0.045 (standard deviation)."
    ),
    "fedasync": (
        "FLSim 0.1.0, APPFL 1.12, flgo, plato (its alpha reset): 4e-7 to 1.7e-6, for constant, polynomial, hinge, "
        "and with the proximal term. flgo's hinge lacks the +1; plato multiplies its stored alpha at every arrival."
    ),
    "fedbuff": (
        "FLSim, flgo, APPFL (deltas): 4e-7 to 7e-7. plato and APPFL's default subtract the current model instead of "
        "the device's base."
    ),
    "port": "plato (the authors'): 4e-7 to 5e-7. Their code has a gate tau > 1 that the paper lacks: option `gate`.",
    "asofed": "AFL-Lib, variant R, lambda 0, r 1: 1.3e-6. No other implementation has the default S.",
    "fedlws": (
        "the official code: 1.0e-6 to 1.3e-6 (FedAvg in its place: 0.014 and 0.11). With BatchNorm the authors' code "
        "pulls running statistics into the groups (0.031)."
    ),
    "fedasmu": (
        "two third-party adaptations, formulas transcribed: alpha to 4e-16 (afl_vlm), beta exactly (DirBridge). Each "
        "of the two has one slip where it differs from the paper. Derivatives against finite differences in float64: "
        "at most 2.2e-7."
    ),
    "fedssmu": "none; it shares FedASMU's code.",
    "fedsa": "none found.",
    "scaffold": "flgo 0.4.4: 6.7e-7 (FedAvg in its place: 0.54).",
    "fednova": "flgo 0.4.4, plain SGD: 2.2e-7 (FedAvg in its place: 0.52).",
    "fedopt": (
        "flwr 1.41.0, synthetic updates, 12 rounds, a test of the suite: 1.5e-7 to 2.9e-7 with our two decisions "
        "applied. Unchanged, Flower starts with v = 0, and its FedAdam corrects its rate for the bias of the moments, "
        "counting rounds from 2 (0.11 to 0.33). FedAvgM also flgo 0.4.4: 4.0e-7."
    ),
    "ca2fl": (
        "the one in FLGo's repository, synthetic updates, 20 versions: 1.6e-7 (FedBuff in its place: 0.51) while no "
        "device is twice in a buffer. It calibrates the second by the first, which shows (0.60). AFL-Lib's records no "
        "device of its buffer, so it calibrates by nothing."
    ),
    "fadas": (
        "AFL-Lib's update, transcribed, synthetic updates, 40 versions, delays up to 25: 2.8e-7 while v only grows. "
        "It divides by the root of v where the paper has vhat (2.3e-3); with vhat there: 2.0e-7."
    ),
    "ace": (
        "the authors' conceptual form (xchang1121/AsyncFL, option A), transcribed, synthetic updates, 98 versions: "
        "2.6e-7, with our start (no updates yet) applied. Their code for ACED steps only every M arrivals and was not "
        "compared."
    ),
    "asyncfeded": "none was run. The equations follow hugo94140/FedOpt; the authors published no code.",
    "fedfa": "zsl503/fedgs, transcribed, synthetic updates, 95 versions: 2.4e-6.",
    "fedstaleweight": (
        "the authors' update (18jeffreyma/afl-bench), transcribed, synthetic updates, 101 versions: 4.1e-7 with "
        "our two decisions applied (FedBuff in its place: 1.2). Unchanged, its window loses the newest value, "
        "which shows (0.56)."
    ),
    "fedat": "none was run. bkjod/FedQS_ counts a tier's uploads instead of its rounds and averages them uniformly.",
    "fedcompass": "none was run. The equations follow the authors' code (APPFL/APPFL).",
    "pisces": "none was run. The equations follow the authors' code (SamuelGong/Pisces).",
    "safa": "none was run. The equations follow the authors' code (wingter562/SAFA), the end of a round does not.",
    "fedac": "none was run. AFL-Lib, FedQS_ and asynflsim disagree with each other; the equations follow AFL-Lib's.",
    "masfl": "none was run. The equations follow wangpengyu2004/AFVLM_CM, the only one found.",
    "fedexp": (
        "the authors' update (Divyansh03/FedExP), transcribed, synthetic updates, 20 rounds, the tested model: "
        "1.3e-6 (FedAvg in its place: 0.51)."
    ),
    "fedacg": (
        "the authors' server (geehokim/FedACG), transcribed, synthetic updates, 20 rounds: 1.2e-6 (FedAvg in its "
        "place: 0.83)."
    ),
    "mifa": (
        "the authors' update (hmgxr128/MIFA_code), transcribed, synthetic updates, 20 rounds: 1.8e-7 with our "
        "start (G = 0) applied (FedAvg in its place: 1.0). FedStale's code (arodio/FedStale) was not run."
    ),
}
ORDER = ("fedasmu", "fedssmu")


def equations() -> str:
    found = registry()
    ordered = [*ORDER, *(name for name in found if name not in ORDER)]
    return "\n".join([EQUATIONS_HEAD, *(card(found[name]) for name in ordered)])


def card(method: Any) -> str:
    about, text = method.about, inspect.cleandoc(inspect.getmodule(method).__doc__ or "")
    kind = "asynchronous" if about.kind == "async" else "synchronous"
    variants = f" Variants: {', '.join(f'`{name}`' for name in about.variants)}." if about.variants else ""
    agrees = AGREES[about.name]
    own = (
        f"**Options**: [{about.name}](configuration.md#{about.name})." if method.Options.model_fields else "No options."
    )
    parts = (
        f"## {about.title}",
        f"`{about.name}`, {kind}.{variants}",
        rest(text),
        own,
        f"**Other implementations**: {agrees}",
    )
    return "\n\n".join(parts) + "\n"


def rest(text: str) -> str:
    """Convert a docstring to Markdown. Text after `::` is already indented."""
    return re.sub(r"::$", ":", text.replace("``", "`"), flags=re.MULTILINE)


# ---- data sets

DATA_TABLE = re.compile(r"(<!-- (\w+): written by scripts/pages.py -->\n\n).*?(\n<!-- end -->\n)", re.DOTALL)


def data() -> str:
    """Return docs/data.md with its tables filled in."""
    tables = {"sets": sets(), "formats": formats()}
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    return DATA_TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", page)


def sets() -> str:
    rows = ["| name | training + test samples | classes | in memory | default network |", "|---|---|---|---|---|"]
    for spec in CATALOGUE.values():
        train, test = spec.counts[0]
        rows.append(f"| `{spec.name}` | {train:,} + {test:,} | {spec.classes} | {memory(spec)} | `{spec.model}` |")
    return "\n".join(rows)


def memory(spec: Spec) -> str:
    sample = ", ".join(map(str, spec.shape)) or "length"
    tokens = " token ids" if spec.kind == "text" else ""
    return f"{spec.dtype} (N, {sample}){tokens}{f'; {spec.note}' if spec.note else ''}"


def formats() -> str:
    rows = ["| name | formats |", "|---|---|"]
    for spec in CATALOGUE.values():
        if not spec.built_in:
            rows.append(f"| `{spec.name}` | {'; '.join(files(form) for form in spec.formats)} |")
    return "\n".join(rows)


def files(form: Format) -> str:
    needs = [f"`{name}`" for name in form.needs]
    return f"{form.title}: {', '.join(needs if len(needs) <= 4 else [needs[0], '...', needs[-1]])}"


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "configuration.md": lambda: runpy.run_path(str(HERE / "configuration.py"))["page"](),
    DOCS / "cli.md": cli,
    DOCS / "events.md": events,
    DOCS / "equations.md": equations,
    DOCS / "data.md": data,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
