"""``freshet paper results``: the page of results, from runs that were kept."""

from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from freshet.errors import ConfigError
from freshet.paper.cells import find_cell
from freshet.paper.results_page import write
from freshet.paper.studies import STUDIES, import_runs


def results(
    folder: Path, page: Path, take: Sequence[Path], cell: str | None, suite: str | None, unused: Collection[str]
) -> None:
    """Bring runs in, if any are named; then write the page with its pictures and print where they are."""
    for option in unused:
        raise ConfigError(option, "means nothing to results, which runs nothing; leave it out")
    if not take and (cell or suite):
        raise ConfigError("--cell" if cell else "--suite", "says where --take brings runs in; give that, too")
    if page.is_dir():
        raise ConfigError("--page", f"{page} is a folder; name a file")
    if take:
        places = import_runs(take, folder, find_cell(cell or STUDIES[0].cell.name), suite)
        typer.echo(f"{len(places)} run{'s' * (len(places) > 1)} brought into {places[0].parent}", err=True)
    for path in write(folder, page):
        typer.echo(str(path))
