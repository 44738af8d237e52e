"""``freshet methods``, ``settings``, ``models``, ``show`` and ``audit``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from freshet.cli.report import Runs
from freshet.errors import RunError
from freshet.files import printable
from freshet.runs.reader import CONFIG, RunDirectory

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from freshet.paper.cells import Cell
    from freshet.runs.audit import Audit

#: Exit codes of an audit that found a problem, and of one that could not check the weights.
EXIT_PROBLEM, EXIT_NOT_AUDITED = 1, 3
#: Whose the variants of FedASMU and FedSSMU are.
WHOSE = (
    "fedasmu, fedssmu: the paper's methods, with its slot selector as printed; -published: its derivatives as printed "
    "too, errors included; -da, -fa, -0: its ablations; -progress, -course, -fresh: ours, with selector = shaped"
)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method's options with their defaults.")] = None,
) -> None:
    """List the methods: kind, citation, variants; with a name, its options and their defaults."""
    from freshet.methods import method_options, registry

    console = Console()
    if name is not None:
        _print_options(console, name)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("method", "kind", "variants", "citation"):
        table.add_column(heading)
    notes: dict[str, str] = {}
    for method in registry().values():
        marks = method.marks()
        notes |= marks
        title = " ".join([method.about.name, *(f"[{mark}]" for mark in marks)])
        kind = "asynchronous" if method.about.kind == "async" else "synchronous"
        table.add_row(escape(title), kind, ", ".join(method.about.variants) or "–", method.about.citation)
    console.print(table)
    for mark, text in notes.items():
        console.print(escape(f"[{mark}] {text}"), style="dim", highlight=False, soft_wrap=True)
    console.print(WHOSE, style="dim", highlight=False, soft_wrap=True)
    console.print("\nOptions and defaults (what they mean: freshet methods NAME)", style="bold")
    for method in registry().values():
        options = method_options(method.about.name, {})
        values = ", ".join(f"{key} {_value(getattr(options, key))}" for key in type(options).model_fields) or "none"
        console.print(f"[bold]{method.about.name}[/bold]: {escape(values)}", highlight=False)


def _value(setting: object) -> str:
    """A setting as text; a dash for an empty one, or a default that is derived from the run."""
    return "–" if setting in (None, "", []) else str(setting)


def _meaning(field: "FieldInfo") -> str:
    """What a setting means, with the words that it accepts if the description does not name them all."""
    hints = (field.annotation, *get_args(field.annotation))
    words = [str(word) for hint in hints if get_origin(hint) is Literal for word in get_args(hint)]
    said = field.description or ""
    if all(word in said for word in words):
        return said
    return "; ".join(filter(None, [said, f"one of {', '.join(words)}"]))


def _print_options(console: Console, name: str) -> None:
    from freshet.methods import class_and_preset, method_options

    method, preset = class_and_preset(name)
    options = method_options(name, {})
    console.print(f"[bold]{name}[/bold]: {method.about.citation}", highlight=False)
    for mark, text in method.marks().items():
        console.print(escape(f"[{mark}] {text}"), style="dim", highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("option", "default", "meaning"):
        table.add_column(heading)
    for key, field in type(options).model_fields.items():
        value = _value(getattr(options, key))
        table.add_row(key, f"{value}{' *' if key in preset else ''}", escape(_meaning(field)))
    console.print(table)
    if preset:
        console.print("* set by this variant", style="dim")


def settings(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A section, section.key, or a key such as lr.")
    ] = None,
) -> None:
    """List the settings with their defaults and meanings; with a key, explain one.

    Options of a method: freshet methods NAME. Any setting can be given with -s section.key=value.
    """
    from freshet.config import SECTIONS, find_settings

    console = Console()
    found = {name: list(model.model_fields) for name, model in SECTIONS.items()} if key is None else find_settings(key)
    for section, keys in found.items():
        table = Table(box=None, header_style="bold", pad_edge=False, title=escape(f"[{section}]"), title_justify="left")
        for heading in ("key", "default", "meaning"):
            table.add_column(heading, no_wrap=heading == "key")
        for name in keys:
            field = SECTIONS[section].model_fields[name]
            table.add_row(name, escape(_value(field.default)), escape(_meaning(field)))
        console.print(table)


def models() -> None:
    """List the networks with their sizes."""
    from freshet.models.registry import describe

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("network", "parameters", "normalisation", "what it is"):
        table.add_column(heading, justify="right" if heading == "parameters" else "left")
    for item in describe():
        table.add_row(item.name, f"{item.parameters:,}", ", ".join(item.norms), item.summary)
    Console().print(table)


def cells(
    name: Annotated[str | None, typer.Argument(help="Show one cell's settings and published results.")] = None,
) -> None:
    """List the paper's twelve cells (network x data set); with a name, its settings, length and published results."""
    from freshet.cli.screen import split_to_fit
    from freshet.paper.cells import CELLS

    if name is not None:
        from freshet.cli.screen import wide_console
        from freshet.paper.cells import find_cell

        _print_cell(wide_console(), find_cell(name))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("cell", "data", "lr", "target", "FedASMU", "FedSSMU"):
        table.add_column(heading, no_wrap=True)
    for cell in CELLS.values():
        ours = (f"{cell.published[m].accuracy:g} in {cell.published[m].time or '–'}" for m in ("fedasmu", "fedssmu"))
        table.add_row(cell.name, cell.dataset, f"{cell.lr:g}", f"{cell.target:g}", *ours)
    console = Console()
    for part in split_to_fit(console, table):
        console.print(part)
    console.print("as published: accuracy, and time to the target; more: freshet cells CELL")


def _source_text(source: str) -> str:
    """The source of a setting; what the paper does not state stands out."""
    return {"paper": "paper", "Freshet": "[yellow]Freshet[/yellow]"}.get(source, f"[cyan]{source}[/cyan]")


def _print_cell(console: Console, cell: "Cell") -> None:
    """Print all settings of a cell, each with its source, and its published results."""
    from freshet.config import resolve
    from freshet.experiments.grid import length_note
    from freshet.paper.cells import SOURCES, all_method_choices, cell_tables, choices

    console.print(length_note(resolve(cell_tables(cell, "fedavg")), cell.name), highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("setting", "value", "source"):
        table.add_column(heading)
    for choice in choices(cell):
        table.add_row(choice.name, escape(_value(choice.value)), _source_text(choice.source))
    console.print(table)
    console.print(
        "paper: the paper states it; paper's numbers: it follows from the published times; Freshet: our choice",
        highlight=False,
        soft_wrap=True,
    )
    console.print("\nOptions of the methods in this cell", style="bold")
    for method, options in all_method_choices(cell).items():
        for source in SOURCES:
            values = ", ".join(f"{c.name} {c.value}" for c in options if c.source == source)
            if values:
                line = f"[bold]{method}[/bold] ({_source_text(source)}): {escape(values)}"
                console.print(line, highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("method", "published accuracy", f"published time to {cell.target:g}"):
        table.add_column(heading)
    for method, result in cell.published.items():
        table.add_row(method, f"{result.accuracy:g}", "–" if result.time is None else f"{result.time:g}")
    console.print("\nPublished results", style="bold")
    console.print(table)


def show(directories: Runs) -> None:
    """Show the settings and the results of a run, also while it is going or after it was killed.

    Several runs, or those in a folder, are shown one after the other.
    """
    from freshet.cli.screen import wide_console
    from freshet.report.reading import runs_to

    console, runs = wide_console(), runs_to("show", directories)
    for directory in runs:
        if len(runs) > 1:
            console.print(f"[bold]{escape(printable(str(directory)))}", highlight=False, soft_wrap=True)
        _print_run(console, directory)
        if directory != runs[-1]:
            console.print()


def _print_run(console: Console, directory: Path) -> None:
    run = RunDirectory(directory)
    config = run.config()
    if run.has_summary():
        _print_results(console, run)
    else:
        _print_unfinished(console, run, config)
    for section in ("method", "fleet", "data", "model", "training", "run"):
        values = ", ".join(f"{key} {_value(value)}" for key, value in config.get(section, {}).items())
        console.print(f"[dim]{section}:[/dim] {escape(printable(values))}", highlight=False, soft_wrap=True)


def _print_results(console: Console, run: RunDirectory) -> None:
    """Print the results of a run that has a summary."""
    from freshet.cli.screen import summary_table
    from freshet.runs.summary import remarks

    summary = run.summary()
    try:
        table, facts = summary_table(console, [summary]), _summary_facts(summary)
        notes = remarks(summary, [] if summary.get("diverged") is None else run.metrics())
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{run.directory}/summary.json is incomplete ({type(error).__name__}: {error})") from None
    console.print(table)
    for remark in notes:
        console.print(f"[yellow]{escape(printable(remark))}", highlight=False, soft_wrap=True)
    _print_facts(console, facts)


def _print_unfinished(console: Console, run: RunDirectory, config: dict[str, Any]) -> None:
    """Print what is known about a run without a summary. An incomplete last line is left out."""
    from freshet.cli.util import reading_bar
    from freshet.display import number
    from freshet.report.reading import read
    from freshet.runs.records import number as figure

    folder = run.directory
    with reading_bar([folder]) as on_bytes:
        found = read(folder, on_bytes)
    kinds = found.events.kinds
    until, rounds = (figure(config.get("run", {}).get(key)) for key in ("until", "rounds"))
    end = " or ".join([f"{until:g} s"] * bool(until) + [f"{rounds:g} rounds"] * bool(rounds)) or "an unknown end"
    last, metric = found.metrics[-1] if found.metrics else {}, found.metric
    facts = {
        "status": "not ended: the run is still going, or was killed",
        "virtual time": f"{found.end:g} s of {end}",
        "newest test": f"{metric.name} {number(metric.of(last))} at {last['time']:g} s" if last else "none yet",
        "events": ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none yet",
        "log": "; ".join(found.notes) or "complete up to here",
    }
    remedy, clock = run.resume_command(), "time" if run.is_deployed() else "virtual time"
    facts = {clock if key == "virtual time" else key: value for key, value in facts.items()}
    if not run.has_checkpoint():
        remedy = f"freshet run --config {folder / CONFIG} (no checkpoint yet)"
    _print_facts(console, facts | {"if it was killed": remedy})


def _print_facts(console: Console, facts: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(f"[dim]{key}", escape(printable(value)))
    console.print(table)


def _duration(summary: dict[str, Any]) -> str:
    rounds = f", {summary['rounds']} rounds" if "rounds" in summary else ""
    real = "" if summary.get("real_time") else f", in {summary['wall_seconds']:g} s of real time"
    return f"{summary['virtual_time']:g} s{rounds}{real}"


def _summary_facts(summary: dict[str, Any]) -> dict[str, str]:
    from freshet.cli.screen import size
    from freshet.display import number

    return {
        "status": str(summary["status"]),
        "time" if summary.get("real_time") else "virtual time": _duration(summary),
        "trips": ", ".join(f"{summary[key]} {key}" for key in ("trips", "uploads", "discards", "lost", "rejected")),
        "fresh models": ", ".join(
            f"{summary[key]} {key}" for key in ("requests", "pushes", "merges") if key in summary
        ),
        "aggregations": f"{summary['aggregations']}, mean staleness {number(summary['mean_staleness'], 2)}",
        "traffic": f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down",
        "weights": f"sha256 {summary['weights_sha256'][:16]}…",
    }


def audit(
    directories: Runs,
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="Your own method (module:Class), if a run names one.")
    ] = None,
) -> None:
    """Replay each run's log against the formulas; name the first line that does not add up (exit code 1).

    A run is "not audited" if the formulas of its method are not available. The exit code is then 3, unless another run
    failed.
    """
    from freshet.cli.util import reading_bar
    from freshet.report.reading import runs_to
    from freshet.runs.audit import audit as audit_run

    failed = unaudited = False
    for directory in runs_to("audit", directories):
        with reading_bar([directory]) as on_bytes:
            found = audit_run(RunDirectory(directory), method, on_bytes)
        failed |= not found.passed
        unaudited |= not found.audited
        typer.echo(printable(f"{directory}: {found.problem or _verdict(found)}"))
    if failed or unaudited:
        raise typer.Exit(EXIT_PROBLEM if failed else EXIT_NOT_AUDITED)


def _verdict(found: "Audit") -> str:
    """The verdict on a log without problems."""
    counts = f"{found.events} events, {found.aggregations} aggregations, {found.merges} merges"
    skipped = ", ".join(f"{kind} ({count})" for kind, count in found.unknown.items())
    if found.unaudited:
        verdict = f"not audited: {found.unaudited}; only the order of events was checked ({counts})"
    else:
        verdict = f"ok ({counts})"
    return f"{verdict}; skipped kinds of events that this version does not know: {skipped}" if skipped else verdict
