"""Safe access to files from untrusted folders: only regular files are opened, and reads are bounded.

Such a folder can hold links to the user's files, pipes that never answer and devices that never end. All problems are
``OSError`` with a reason, so that callers treat them like any other unusable file.
"""

import errno
import os
import resource
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NoReturn

from freshet.errors import RunError

#: The most bytes read from a text file (settings, summaries).
TEXT_LIMIT = 1 << 26


def open_regular(path: Path, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading. Pipes and devices are refused, and without ``links`` also links."""
    return os.fdopen(_descriptor(path, os.O_RDONLY | (0 if links else os.O_NOFOLLOW)), "rb")


def open_own(path: Path, *, create: bool = False) -> BinaryIO:
    """Open a file for reading and writing if it is not a link, a pipe or hard-linked elsewhere."""
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    return os.fdopen(_descriptor(path, flags, alone=True), "r+b")


def _descriptor(path: Path, flags: int, *, alone: bool = False) -> int:
    """A descriptor of a regular file. O_NONBLOCK prevents waiting for the other end of a pipe."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _refuse(path, "it is a link")
        if error.errno == errno.ENXIO:
            _refuse(path, "it is not a regular file")
        raise
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            _refuse(path, "it is not a regular file")
        if alone and facts.st_nlink > 1:
            _refuse(path, "it has a hard link elsewhere; replace it by a copy")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse(path: Path, reason: str) -> NoReturn:
    raise OSError(errno.EINVAL, reason, str(path))


def read_regular(path: Path, limit: int = TEXT_LIMIT, *, links: bool = True) -> bytes:
    """The contents of a regular file of at most ``limit`` bytes."""
    with open_regular(path, links=links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
    return content


def open_many() -> int:
    """Raise the limit of open files, for this process and its children, to the maximum. Returns the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems have a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def own_folder(folder: Path) -> None:
    """Make a folder unless it exists. A link is refused."""
    folder.mkdir(exist_ok=True)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        _refuse(folder, "it is a link")


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Replace a file atomically: a reader sees the old content or the new, even after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same id
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically with ``content``."""
    with replacing(path) as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors such as a full disk or a missing folder into one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written ({reason(error)}); {remedy}") from error


def reason(error: OSError) -> str:
    """The operating system's description of an error."""
    return error.strerror or str(error) or type(error).__name__


class WatchedFiles:
    """The files and folders that Python code has read, to notice later that one of them has changed.

    An audit hook sees what Python opens for reading and lists. It does not see what compiled libraries open by
    themselves. A process can have one such object only, because a hook cannot be removed.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...] | None] = {}
        self._records = False
        sys.addaudithook(self._hook)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is read, and at the end the source files of all modules outside Python's own folders."""
        self._records = True
        try:
            yield
        finally:
            self._records = False
            for name, module in list(sys.modules.items()):
                path = getattr(module, "__file__", None)
                if isinstance(path, str) and (name.partition(".")[0] == __package__ or not _is_installed(path)):
                    self._seen.setdefault(path, _identity(path))
            self._seen = {path: seen for path, seen in self._seen.items() if Path(path).exists()}  # no temporary files

    def first_change(self) -> str:
        """The first file or folder that differs from when it was read, or the empty string."""
        return next((path for path, before in self._seen.items() if _identity(path) != before), "")

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._records or event not in ("open", "os.listdir", "os.scandir"):
            return
        path = os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else None
        if not isinstance(path, str) or (event == "open" and not _only_reads(*arguments[1:3])):
            return
        if sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):  # modules are recorded at the end
            return
        path = str(Path(path).absolute())
        if event != "open" and path in sys.path:  # listed to find modules and packages
            return
        if not _is_installed(path) and not path.startswith(("/proc/", "/sys/", "/dev/")):
            self._seen.setdefault(path, _identity(path))


def _only_reads(mode: object, flags: object) -> bool:
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR)


def _is_installed(path: str) -> bool:
    """Whether a path is inside this Python, which does not change while it runs."""
    return path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))


def _identity(path: str) -> tuple[int, ...] | None:
    """What changes with the content of a file, or with the names in a folder. None if there is neither."""
    try:
        facts = Path(path).stat()
    except (OSError, ValueError):
        return None
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns)


def printable(text: object) -> str:
    """Untrusted text for a terminal. Control characters are escaped."""
    shown = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))
    return "".join(shown)
