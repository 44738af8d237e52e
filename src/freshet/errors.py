"""Errors that a user can cause and fix. The command line prints them as one sentence and exits with code 2."""


class FreshetError(Exception):
    """Base of every error that Freshet raises on purpose. Its text is one sentence for the user."""


class ConfigError(FreshetError, ValueError):
    """A setting is unknown, of the wrong type or impossible. The text names the key and what is allowed."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.key, self.problem)


class DataError(FreshetError, ValueError):
    """The training or test data cannot be used (missing, damaged, wrong shape, label out of range, NaN)."""


class Stop(Exception):
    """Raised by an observer to end a run. It stops before its next event with status "stopped" and complete files."""


class RunError(FreshetError, RuntimeError):
    """A run directory or log cannot be used, or a run cannot continue."""
