"""Files that code has read are noticed when they change. Each case runs in a process of its own: a hook stays."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, sys, time
from pathlib import Path
from freshet.files import WatchedFiles
here = Path(sys.argv[1])
watched = WatchedFiles()
"""
CASES = {
    "a file that was read": (
        "(here / 'data').write_text('a')",
        "open(here / 'data').read()",
        "(here / 'data').write_text('other')",
        True,
    ),
    "a file with the same length": (
        "(here / 'data').write_text('a')",
        "(here / 'data').read_bytes()",
        "os.utime(here / 'data', ns=(1, 1))",
        True,
    ),
    "an archive read by numpy": (
        "import numpy as np; np.savez(here / 'x.npz', x=np.zeros(3))",
        "np.load(here / 'x.npz')['x']",
        "np.savez(here / 'x.npz', x=np.ones(4))",
        True,
    ),
    "a file that has gone": (
        "(here / 'data').write_text('a')",
        "open(here / 'data').read()",
        "(here / 'data').unlink()",
        True,
    ),
    "a new file in a folder that was listed": (
        "(here / 'images').mkdir()",
        "list((here / 'images').iterdir())",
        "(here / 'images' / '1.png').touch()",
        True,
    ),
    "the source of a module": (
        "sys.path.insert(0, str(here)); (here / 'mine.py').write_text('x = 1')",
        "import mine",
        "(here / 'mine.py').write_text('x = 22')",
        True,
    ),
    "a module's folder": (
        "sys.path.insert(0, str(here)); (here / 'mine.py').write_text('x = 1')",
        "import mine; os.listdir(here)",
        "(here / 'run.log').touch()",
        False,
    ),
    "a file that was only written": (
        "pass",
        "(here / 'log').write_text('a')",
        "(here / 'log').write_text('other')",
        False,
    ),
    "a temporary file": (
        "(here / 'data').write_text('a')",
        "open(here / 'data').read(); (here / 'data').unlink()",
        "(here / 'data').write_text('other')",
        False,
    ),
    "nothing": ("(here / 'data').write_text('a')", "open(here / 'data').read()", "pass", False),
}


@pytest.mark.parametrize("case", CASES)
def test_change_is_noticed(case: str, tmp_path: Path) -> None:
    before, load, change, noticed = CASES[case]
    lines = [HEAD, before, f"with watched.recording():\n    {load}", "early = watched.first_change()", change]
    lines.append("print(repr(early), bool(watched.first_change()))")
    words = [sys.executable, "-c", "\n".join(lines), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"'' {noticed}\n"
