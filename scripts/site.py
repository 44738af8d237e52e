"""What mkdocs calls while it builds the site (mkdocs.yml, hooks): pages that are not made yet are left out."""

from pathlib import Path
from typing import Any

#: Pages that come from work of their own; all others must be there.
LATER = ("results.md",)


def on_config(config: Any) -> Any:
    absent = {name for name in LATER if not (Path(config["docs_dir"]) / name).is_file()}
    config["nav"] = kept(config["nav"], absent)
    return config


def kept(nav: list[Any], absent: set[str]) -> list[Any]:
    """The navigation without pages that are absent."""
    out: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, target),) = entry.items()
            if isinstance(target, list):
                out.append({title: kept(target, absent)})
            elif target not in absent:
                out.append(entry)
        elif entry not in absent:
            out.append(entry)
    return out
