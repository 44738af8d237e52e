"""Turning a validation error into one sentence that names the key and what is allowed."""

from difflib import get_close_matches

from pydantic import BaseModel, ValidationError

from freshet.errors import ConfigError


def first_problem(section: str, error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """The first problem of a section as a ``ConfigError``."""
    problem = error.errors()[0]
    field = str(problem["loc"][0]) if problem["loc"] else ""
    key = f"{section}.{field}" if field else section
    if problem["type"] == "extra_forbidden":
        close = get_close_matches(field, model.model_fields, n=1)
        known = ", ".join(model.model_fields) or "none, there is nothing to choose here"
        hint = f"did you mean {section}.{close[0]}?" if close else f"known keys: {known}"
        return ConfigError(key, f"is not a known key; {hint}")
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return ConfigError(key, f"{message}, but {problem['input']!r} was given")
