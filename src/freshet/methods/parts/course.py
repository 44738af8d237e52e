"""Controls that learn from the server's course (ours): one set for all devices, judged by who starts from a new model.

The paper estimates the slope along a device's last step from the device's own next upload. Its own samples nearly
always ask for more of its own step, so what is learned that way only grows (docs/results.md). Here the server keeps its
course, what the last uploads did together, with a memory as long as uploads are stale::

    m_{v+1} = (1 - 1/s) m_v + alpha d        d what training produced, s the staleness of that upload

A device that starts from version o and trains by ``d_j`` has found the slope of its loss along the course that led
there: ``d F_j(w_o) / d eps = <grad F_j(w_o), m_o>``, eps a common relative change of those weights, and
``grad F_j ~ -d_j``. Over devices that is the slope of the whole federation's loss, at that very model. Where they go on
in the server's direction, weights were too small; where they turn back, too large: ``q = -cos(d_j, m_o)``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from freshet.core.vectors import Vector, dot, norm
from freshet.methods.parts.staleness import Control, Past


@dataclass(frozen=True)
class Made:
    """How a version came about: the numbers of its last upload (``length``: that of the course), and the course."""

    past: Past
    course: Vector


@dataclass
class Course:
    """The controls of all devices, and the course at each version that a device may have started from."""

    control: Control
    made: dict[int, Made] = field(default_factory=dict)

    def judged(self, base: int, step: Vector) -> tuple[float | None, Past | None]:
        """``<step, m>`` with the course at a version, and that version's past (None: it is the first one)."""
        made = self.made.get(base)
        return (None, None) if made is None else (dot(step, made.course), made.past)

    def follow(self, past: Past, alpha: float, step: Vector, held: Callable[[int], bool]) -> float:
        """An upload was taken in: the course at the version that it made, and its length; versions that nobody holds
        are forgotten."""
        new, before = np.float32(alpha) * step, self.made.get(past.version)
        with np.errstate(over="ignore"):
            course = new if before is None else new + np.float32(1.0 - 1.0 / past.s_p) * before.course
        length, version = norm(course), past.version + 1
        if not math.isfinite(length):  # beside the largest numbers it begins anew
            course, length = new, norm(new)
        self.made = {v: made for v, made in self.made.items() if held(v)}
        self.made[version] = Made(Past(past.version, past.p, past.s_p, past.xi_p, past.control, length), course)
        self.control = past.control
        return length
