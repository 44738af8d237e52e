"""The results pages, from the folder of archived runs: a short page, an appendix with every number, and pictures."""

from pathlib import Path

from freshet.errors import ConfigError, RunError
from freshet.files import read_regular, reason, write_atomically, writing
from freshet.paper.claims import claims_section, claims_summary, verdicts_sentence
from freshet.paper.pictures import draw_study, draw_worlds
from freshet.paper.studies import Archive
from freshet.paper.tables import (
    ablation_section,
    cells_section,
    cells_summary,
    fresh_models_section,
    study_details,
    study_section,
    suites_section,
)

WORLDS_PICTURE = "results-worlds.png"
#: The words before and after the tables of each page, in files beside the runs.
INTRO, NOTES = "INTRO.md", "NOTES.md"
APPENDIX_INTRO, APPENDIX_NOTES = "APPENDIX_INTRO.md", "APPENDIX_NOTES.md"
#: How the pages begin without these files.
PLAIN_INTRO = "# Results\n\nMade by `freshet paper results` from archived runs.\n"
#: Stands in the words for the verdicts on the paper's numbers in one sentence.
VERDICTS_MARK = "{verdicts}"
PLAIN_APPENDIX = "# Results: appendix\n\nMade by `freshet paper results` from archived runs.\n"


def write(results: Path, page: Path) -> list[Path]:
    """Write both pages of a folder of archived runs, with pictures in images/ beside them; return all files."""
    if not results.is_dir():
        raise ConfigError("--out", f"there is no folder {results}; name the folder with the archived runs")
    archive = Archive.read(results)
    if archive.empty:
        raise RunError(f"{results} holds no runs; import some with --take FOLDER --cell CELL")
    appendix, pictures = appendix_path(page), page.parent / "images"
    texts = page_texts(results, archive, appendix.name)
    files = [draw_study(each.study, each.runs, pictures / each.study.picture) for each in archive.studies if each.runs]
    files += [draw_worlds(archive.studies[0], pictures / WORLDS_PICTURE)] if archive.has_main_runs else []
    for path, text in zip((page, appendix), texts, strict=True):
        with writing(path, "choose another place with --page"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
    return [page, appendix, *files]


def appendix_path(page: Path) -> Path:
    """The appendix lies beside the page: results.md, results-appendix.md."""
    return page.with_name(f"{page.stem}-appendix{page.suffix}")


def page_texts(results: Path, archive: Archive, appendix: str) -> tuple[str, str]:
    """The text of the page and of the appendix, with the words that lie beside the runs."""
    intro = _words(results / INTRO, PLAIN_INTRO).replace(VERDICTS_MARK, verdicts_sentence(archive))
    return (
        main_text(archive, appendix, intro, _words(results / NOTES, "")),
        appendix_text(archive, _words(results / APPENDIX_INTRO, PLAIN_APPENDIX), _words(results / APPENDIX_NOTES, "")),
    )


def main_text(
    archive: Archive, appendix: str = "results-appendix.md", intro: str = PLAIN_INTRO, notes: str = ""
) -> str:
    """The first page: what fresh models bring, main runs, other worlds and cells, verdicts on the paper's numbers."""
    lines = [intro, *fresh_models_section(archive.ablations, appendix)]
    for study, runs, _ in archive.studies:
        lines += study_section(study, runs) if runs else []
    if archive.has_main_runs:
        lines += ["## Other worlds", "", f"![accuracy in other worlds](images/{WORLDS_PICTURE})", ""]
        lines += [f"Accuracies and times: [appendix]({appendix}#suites).", ""]
    lines += [*cells_summary(archive.cells), *claims_summary(archive, appendix)]
    rest = "every seed, every rival, all suites, the other cells, and an answer to each number of the paper"
    return "\n".join([*lines, f"The [appendix]({appendix}) has the rest: {rest}.", "", notes])


def appendix_text(archive: Archive, intro: str = PLAIN_APPENDIX, notes: str = "") -> str:
    """The appendix: all runs in full, and an answer to each claim of the paper."""
    lines = [intro]
    for study, runs, _ in archive.studies:
        lines += study_details(study, runs) if runs else []
    lines += cells_section(archive.cells)
    lines += suites_section(archive.studies) if archive.has_main_runs else []
    return "\n".join([*lines, *ablation_section(archive.ablations), *claims_section(archive), notes])


def _words(path: Path, otherwise: str) -> str:
    """A text beside the runs, or a default."""
    if not path.exists():
        return otherwise
    try:
        return read_regular(path).decode()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({reason(error)})") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} cannot be read (it is not text in UTF-8)") from None
