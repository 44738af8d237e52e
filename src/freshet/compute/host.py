"""What every kind of worker does with a call: hold trainers, compute, and answer with a result or an error."""

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch

from freshet.compute.base import Setup
from freshet.compute.memory import keep_freed_memory
from freshet.errors import FreshetError, RunError
from freshet.training.trainer import Trainer


class Host:
    """Trainers by the number of their setup. Answers are bytes for ``open_answer``; nothing is ever raised."""

    def __init__(self) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self._trainers: dict[int, Trainer] = {}

    def install(self, number: int, drop: Sequence[int], load: Callable[[], Setup]) -> bytes:
        """Build the trainer of a setup, after forgetting those that are not needed any more."""
        for old in drop:
            self._trainers.pop(old, None)

        def build() -> None:
            self._trainers[number] = load().trainer()

        return answer(build)

    def call(self, number: int, request: bytes) -> bytes:
        """Call a trainer's method; the request holds its name and arguments."""

        def compute() -> Any:
            name, arguments = pickle.loads(request)  # noqa: S301  (from our own parent process)
            return getattr(self._trainers[number], name)(*arguments)

        return answer(compute)


def request(name: str, arguments: tuple[Any, ...]) -> bytes:
    """A call as bytes, classes of ``__main__`` included."""
    try:
        content: bytes = cloudpickle.dumps((name, arguments))
    except Exception as error:
        raise RunError(f"a task cannot be sent to a worker: {error}") from error
    return content


def answer(compute: Callable[[], Any]) -> bytes:
    """The result of a computation, or its error in a form that can always be sent."""
    try:
        return pickle.dumps((None, compute()), protocol=5)
    except FreshetError as error:
        return pickle.dumps(((type(error).__name__, error.args, vars(error)), None))
    except BaseException:  # also SystemExit: a user's code must not end the worker
        return pickle.dumps((("", (traceback.format_exc(),), {}), None))


def open_answer(content: bytes) -> Any:
    """The result, or the error raised here: Freshet's own as they were, all others as a ``RunError``."""
    error, result = pickle.loads(content)  # noqa: S301  (from our own worker)
    if error is None:
        return result
    name, arguments, attributes = error
    kinds = {kind.__name__: kind for kind in FreshetError.__subclasses__()}
    if name not in kinds:
        raise RunError(f"training failed in a worker:\n{arguments[0]}")
    same = kinds[name].__new__(kinds[name])
    same.args = arguments
    vars(same).update(attributes)
    raise same
