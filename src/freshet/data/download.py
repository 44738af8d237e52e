"""Download an official archive to the user's cache, with a checksum, a progress bar and one-sentence errors."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from freshet.errors import DataError

_ATTEMPTS = 3
_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 16
_MAX_BYTES = 1 << 30  # bytes; the largest official archive has 248 MB


@dataclass(frozen=True)
class Remote:
    """One official file: its name, its checksum as ``algorithm:hex`` and the addresses to try in order."""

    filename: str
    checksum: str
    urls: tuple[str, ...]


def download(name: str, remote: Remote, folder: Path, attempts: int = _ATTEMPTS, pause: float = 1.0) -> Path:
    """Download a verified file to ``folder`` and return its path. A failed attempt leaves nothing behind."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    reason = "no address is known"
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        for url in remote.urls:
            try:
                # pooch moves its temporary file into place only if the checksum matches
                return Path(pooch.retrieve(url, remote.checksum, remote.filename, folder, downloader=_fetch))
            except OSError as error:  # includes the errors of requests
                reason = f"{url}: {_describe(error)}"
            except ValueError:
                reason = f"the file from {url} has a wrong checksum (expected {remote.checksum})"
    raise DataError(
        f"{name}: the download of {remote.filename} failed ({reason}); try again with a network connection, or put the "
        "official file into a folder and name that folder with --data-dir or FRESHET_DATA"
    )


def _fetch(url: str, output_file: str, pooch: object) -> None:
    """Download for pooch without decoding.

    pooch's default downloader undoes a gzip declared as Content-Encoding. Checksums of archives would then never match.
    """
    import requests
    import urllib3

    progress = DownloadBar(Path(output_file).name if url.endswith("/") else url.rsplit("/", 1)[-1])
    with (
        requests.get(url, stream=True, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"}) as response,
        Path(output_file).open("wb") as file,
    ):
        response.raise_for_status()
        progress.total = int(response.headers.get("content-length", 0))
        try:
            for chunk in response.raw.stream(_CHUNK, decode_content=False):
                file.write(chunk)
                progress.update(len(chunk))
                if progress.done > _MAX_BYTES:
                    raise OSError(f"sends more than {_MAX_BYTES:,} bytes")
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError("the connection broke off") from error
        finally:
            progress.close()


def verify_file(path: Path, checksum: str) -> bool:
    """Return whether the file has the checksum ``algorithm:hex``."""
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest() == expected


def _describe(error: OSError) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code}"
    kind = type(error).__name__
    if "Timeout" in kind:
        return "no answer in time"
    if isinstance(error, ConnectionError):
        return str(error)
    if "Connection" in kind or "SSL" in kind or "Proxy" in kind:
        return "no connection"
    return error.strerror or str(error) or kind


class DownloadBar:
    """A progress bar on stderr, drawn only on a terminal."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self.label, self.stream = label, stream or sys.stderr
        self.total, self.done, self.drawn = 0, 0, 0.0
        self.open = False

    def update(self, amount: int) -> None:
        """Count ``amount`` more bytes."""
        self.done += amount
        if self.stream.isatty() and (time.monotonic() - self.drawn > 0.1 or self.done >= self.total):
            self.drawn, self.open = time.monotonic(), True
            share = min(self.done / self.total, 1.0) if self.total else 0.0
            bar = "━" * round(30 * share)
            self.stream.write(
                f"\r{self.label}  {bar:<30} {share:4.0%}  {self.done / 1e6:.1f}/{self.total / 1e6:.1f} MB"
            )
            self.stream.flush()

    def close(self) -> None:
        """End the line."""
        if self.open:
            self.stream.write("\n")
            self.open = False
