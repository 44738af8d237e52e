"""The page of results, from the folder of kept runs: its words, tables and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from freshet.errors import ConfigError, RunError
from freshet.experiments.findings import answers, others, suites, tables
from freshet.experiments.findings.pictures import draw, draw_worlds
from freshet.experiments.findings.studies import STUDIES, Found, Runs
from freshet.files import read_regular, reason, writing
from freshet.runs.writer import write_atomically

WORLDS_PICTURE = "results-worlds.png"
#: The words before and after the tables, beside the runs; without the first, the page begins like this.
INTRO, NOTES = "INTRO.md", "NOTES.md"
PLAIN_INTRO = "# Results\n\nMade by `freshet paper results` from runs that were kept.\n"


def write(results: Path, page: Path) -> list[Path]:
    """Write the page of a folder of kept runs, with pictures in images/ beside it; returns all files."""
    if not results.is_dir():
        raise ConfigError("--out", f"there is no folder {results}; name the one with the kept runs")
    found = [Found.read(study, results) for study in STUDIES]
    cells = others.read_others(results)
    if not cells and not any(each.runs for each in found):
        raise RunError(f"{results} holds no runs; bring some in with --take FOLDER --cell CELL")
    intro, notes = _words(results / INTRO, PLAIN_INTRO), _words(results / NOTES, "")
    text, pictures = text_of(found, cells, intro, notes), page.parent / "images"
    files = [draw(each.study, each.runs, pictures / each.study.picture) for each in found if each.runs]
    files += [draw_worlds(found[0], pictures / WORLDS_PICTURE)] if any(each.runs for each in found) else []
    with writing(page, "choose another place with --page"):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, text.encode())
    return [page, *files]


def text_of(found: Sequence[Found], cells: Mapping[str, Runs], intro: str = PLAIN_INTRO, notes: str = "") -> str:
    """The page: the main runs by study, the other cells, suites, and what the paper says to it all."""
    lines, main = [intro], any(each.runs for each in found)
    for study, runs, _ in found:
        lines += tables.section(study, runs) if runs else []
    lines += others.section(cells)
    if main:
        lines += [*suites.section(found, WORLDS_PICTURE), *answers.section(found)]
    return "\n".join([*lines, notes])


def _words(path: Path, otherwise: str) -> str:
    """A text beside the runs, if it is there."""
    if not path.exists():
        return otherwise
    try:
        return read_regular(path).decode()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({reason(error)})") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} cannot be read (it is not text in UTF-8)") from None
