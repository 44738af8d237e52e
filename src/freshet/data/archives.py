"""Read untrusted archives and folders member by member, in memory. Nothing is unpacked to disk.

Every name is checked. Sizes are bounded before and while reading. Links, pipes and devices are refused. Whatever the
standard library raises on a damaged file becomes one DataError.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from freshet.errors import DataError, FreshetError
from freshet.files import open_regular

MAX_MEMBER_BYTES = 1 << 28  # bytes; the largest official member is 155 MB
MAX_TOTAL_BYTES = 1 << 31  # bytes of all members together; the largest official archive unpacks to less than 1 GB
MAX_EXPANSION = 20  # unpacked over packed size; official archives stay below 4
EXPANSION_FREE_BYTES = 1 << 26  # archives that unpack to less may expand freely
MAX_MEMBERS = 1_000_000
MAX_HEADER_BYTES = 1 << 16  # headers of one tar member; official ones have 512 bytes

NameFilter = Callable[[str], bool]


@contextmanager
def as_data_errors(path: Path) -> Iterator[None]:
    """Turn the decoders' errors on a broken file into one sentence."""
    try:
        yield
    except FreshetError:
        raise
    except OSError as error:  # unreadable, bad gzip, or Pillow's UnidentifiedImageError
        reason = error.strerror or _first_line(error)
        raise DataError(f"{path} cannot be read ({reason}); get it again or fix its permissions") from error
    except MemoryError:  # not the file's fault
        raise
    except Exception as error:  # decoders raise many types on untrusted bytes; all mean the same to the user
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise DataError(f"{path} is damaged, truncated or in another format ({reason}); get it again") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no details"])[0][:160].rstrip(".: ")


def members(path: Path, wanted: NameFilter, limit: int = MAX_MEMBER_BYTES) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the wanted members of a folder, zip or (compressed) tar, in a stable order."""
    with as_data_errors(path):
        if path.is_dir():
            yield from _folder(path, wanted, limit)
        elif path.suffix == ".zip":
            yield from _zip(path, wanted, limit)
        else:
            yield from _tar(path, wanted, limit)


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the contents of a plain, .gz or .xz file. Refuse more than ``limit`` bytes (a decompression bomb)."""
    with open_decoded(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DataError(f"{path} holds more than {limit:,} bytes, too large for this format; it is refused")
    return data


@contextmanager
def open_decoded(path: Path) -> Iterator[BinaryIO]:
    """Open a plain, .gz or .xz file for reading. Errors on a broken file become one sentence."""
    with as_data_errors(path), open_regular(path, links=False) as raw, _decoder(path, raw) as file:
        yield cast(BinaryIO, file)


def _decoder(path: Path, file: BinaryIO) -> gzip.GzipFile | lzma.LZMAFile | BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    return lzma.LZMAFile(file) if path.suffix == ".xz" else file


def safe_name(archive: Path, name: str) -> str:
    """Return the member's name if it stays inside its folder; refuse it otherwise."""
    pure = PurePosixPath(name.replace("\\", "/"))
    drive = len(name) > 1 and name[1] == ":"
    if pure.is_absolute() or drive or ".." in pure.parts or "\0" in name:
        raise DataError(f"{archive} holds the member {name!r}, which leads out of its folder; the archive is refused")
    return str(pure)


def _check_size(archive: Path, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise DataError(f"{archive} holds the member {name!r} of {size:,} bytes; at most {limit:,} are allowed")


def _folder(path: Path, wanted: NameFilter, limit: int) -> Iterator[tuple[str, bytes]]:
    for root, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files):
            full = Path(root) / file
            name = full.relative_to(path.parent).as_posix()
            if wanted(name):
                with open_regular(full, links=False) as opened:
                    _check_size(path, name, os.fstat(opened.fileno()).st_size, limit)
                    yield name, opened.read(limit)


def _zip(path: Path, wanted: NameFilter, limit: int) -> Iterator[tuple[str, bytes]]:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        packed = os.fstat(file.fileno()).st_size
        _check_totals(path, packed, len(infos), sum(info.file_size for info in infos))
        for info in infos:
            safe_name(path, info.filename)
            if (info.external_attr >> 16) & 0o170000 == 0o120000:
                raise DataError(f"{path} holds the link {info.filename!r}; an archive with links is refused")
        for info in infos:
            name = safe_name(path, info.filename)
            if info.is_dir() or not wanted(name):
                continue
            _check_size(path, name, info.file_size, limit)
            with archive.open(info) as member:  # never gives more than the declared size, and checks the CRC
                data = member.read(limit + 1)
            if len(data) != info.file_size:
                raise DataError(f"{path}: the member {name!r} is truncated; get the archive again")
            yield name, data


class _Headers:
    """Give ``tarfile`` a bounded stream: it reads long names and attributes whole, whatever their length.

    The headers of one member are bounded. Nothing of a member is kept when the next one comes.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream, self._left = path, stream, MAX_HEADER_BYTES
        self.tell, self.seek = stream.tell, stream.seek
        self._archive: Any = tarfile.open(fileobj=cast(BinaryIO, self), mode="r:")  # noqa: SIM115 (the stream is not ours to close)

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0:
            raise DataError(f"{self._path} has headers longer than any data set needs; the archive is refused")
        return self._stream.read(size)

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        while (info := self._archive.next()) is not None:
            yield info
            self._left = MAX_HEADER_BYTES
            self._archive.members.clear()
            self._archive.pax_headers.clear()


def _tar(path: Path, wanted: NameFilter, limit: int) -> Iterator[tuple[str, bytes]]:
    count = total = 0
    with open_regular(path) as opened, _decompress(opened) as stream:
        for info in _Headers(path, stream):
            count, total = count + 1, total + info.size
            _check_totals(path, os.fstat(opened.fileno()).st_size, count, total)
            name = safe_name(path, info.name)
            if info.isdir():
                continue
            if not info.isreg() or info.issparse() or info.size < 0:
                raise DataError(f"{path} holds {name[:100]!r}, a link or special file; such an archive is refused")
            if not wanted(name):
                continue
            _check_size(path, name, info.size, limit)
            stream.seek(info.offset_data)
            data = stream.read(info.size)
            if len(data) != info.size:
                raise DataError(f"{path}: the member {name!r} is truncated; get the archive again")
            yield name, data


def _decompress(file: BinaryIO) -> BinaryIO:
    """Return the tar stream of a file. The first bytes identify the compression."""
    head = file.read(6)
    file.seek(0)
    readers: dict[bytes, Callable[[BinaryIO], object]] = {
        b"\x1f\x8b": lambda packed: gzip.GzipFile(fileobj=packed),
        b"BZh": bz2.BZ2File,
        b"\xfd7zXZ\0": lzma.LZMAFile,
    }
    reader = next((reader for magic, reader in readers.items() if head.startswith(magic)), None)
    return file if reader is None else cast(BinaryIO, reader(file))


def _check_totals(path: Path, packed: int, count: int, size: int) -> None:
    if count > MAX_MEMBERS or size > MAX_TOTAL_BYTES:
        problem = "more than any known data set; it is refused"
        raise DataError(f"{path} unpacks to {count:,} members or {size:,} bytes, {problem}")
    if size > max(EXPANSION_FREE_BYTES, MAX_EXPANSION * packed):
        problem = f"more than {MAX_EXPANSION} times as much; it is refused"
        raise DataError(f"{path} has {packed:,} bytes and unpacks to {size:,}, {problem}")
