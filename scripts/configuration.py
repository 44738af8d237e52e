"""Write docs/configuration.md from the settings: ``python scripts/configuration.py``."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from freshet.config import SECTIONS
from freshet.core.method import Options
from freshet.methods import registry

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

Give settings in a TOML file (`freshet run --config file.toml`), in a YAML file (extra `yaml`), as `--set
section.key=value`, or as tables in Python (`Federation(fleet={"ratio": 20})`). Every value is checked. A run writes all
values to its `config.toml`.
`scripts/pages.py` writes this page from the code.
"""


def table(model: type[BaseModel]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        rows.append(f"| `{name}` | {format_value(field.default)} | {meaning(field)} |")
    return "\n".join([*rows, *(f"\n{line}" for line in conditional_defaults(model))])


def meaning(field: FieldInfo) -> str:
    """Return the description, with the allowed words if it does not name them all."""
    said = (field.description or "").replace("|", "\\|")
    words = choices(field.annotation)
    named = all(word in said for word in words)
    return said if named else f"{said}; one of {', '.join(map(format_value, words))}"


def choices(annotation: Any) -> list[str]:
    """Return the words that a setting accepts."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for part in get_args(annotation) for word in choices(part)]


def conditional_defaults(model: type[BaseModel]) -> list[str]:
    """Describe the defaults that follow from another option."""
    found = model.conditional_defaults if issubclass(model, Options) else {}
    lines = []
    for (key, value), defaults in found.items():
        others = ", ".join(f"`{k} = {v}`" for k, v in defaults.items() if k != key)
        lines.append(f'With `{key} = "{value}"` the defaults are: {others}.')
    return lines


def format_value(default: object) -> str:
    """Format a default. A dash means that the description explains it."""
    return "–" if default is None else '`""`' if default == "" else f"`{default}`"


def page() -> str:
    parts = [HEAD]
    for name, model in SECTIONS.items():
        parts.append(f"## [{name}]\n\n{(model.__doc__ or '').strip()}\n\n{table(model)}\n")
    parts.append("## [method]\n\n`name` and the method's own options.\n")
    for method in registry().values():
        about = method.about
        mark = ", reconstructed" if about.reconstructed else ""
        remark = f" [{about.remark.mark}] {about.remark.text}." if about.remark else ""
        variants = f" Variants: {', '.join(f'`{v}`' for v in about.variants)}." if about.variants else ""
        own = f"\n\n{table(method.Options)}" if method.Options.model_fields else "\n\nNo options."
        parts.append(f"### {about.name}\n\n{about.citation} ({about.kind}{mark}).{remark}{variants}{own}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
