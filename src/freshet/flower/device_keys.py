"""Which device signs a call to the SuperLink, found in the headers alone, and a log of logins and refusals.

A SuperNode signs the time of each call with its key. Flower checks the signature after it has read the whole call.
This module checks the same headers first, so nothing of an unsigned call is read.
"""

import binascii
import time
from base64 import b64decode
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Headers = Iterable[tuple[bytes, bytes]]
KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER = b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"
#: Seconds by which a device's clock may be ahead of the server's, and behind it. Flower has the same bounds.
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0
#: Seconds for which an address of a device counts as in use.
ADDRESS_SECONDS = 120.0
#: Lines that may be logged per hour, so that strangers cannot fill the disk.
MAX_LINES_PER_HOUR = 1000


class Caller(NamedTuple):
    """Who signs a call: the name of a key, or why the call is refused."""

    name: str
    problem: str = ""


class DeviceKeys:
    """The keys in a folder: ``node_K.pub`` of devices, ``node_K.revoked`` of devices that are locked out."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._changed = folder, -1
        self._keys: dict[bytes, tuple[str, bool]] = {}

    def identify(self, headers: Headers, now: datetime | None = None) -> Caller:
        """Find out who signs a call. Only its headers are read."""
        found: dict[bytes, list[bytes]] = {}
        for header, value in headers:
            found.setdefault(header.lower(), []).append(value)
        try:
            [key_text], [signature_text], [timestamp] = (found[h] for h in (KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER))
            pem, signature = b64decode(key_text, validate=True), b64decode(signature_text, validate=True)
            signed_at = datetime.fromisoformat(timestamp.decode("ascii"))
            ahead = (signed_at - (now or datetime.now(UTC))).total_seconds()
        except (KeyError, ValueError, TypeError, binascii.Error):
            return Caller("", "a call without a signature")
        name, revoked = self._keys_by_bytes().get(pem, ("", False))
        if not name:
            return Caller("", "an unknown key")
        if not _signed(pem, timestamp, signature):
            return Caller(name, f"a wrong signature for the key of {name}")
        if revoked:
            return Caller(name, f"the revoked key of {name}")
        if not -BEHIND_SECONDS < ahead < AHEAD_SECONDS:
            side = "ahead of" if ahead > 0 else "behind"
            return Caller(name, f"{name}, whose clock is {abs(ahead):.0f} s {side} the server's")
        return Caller(name)

    def _keys_by_bytes(self) -> dict[bytes, tuple[str, bool]]:
        """The keys by their bytes in a call. They are read again when the folder has changed."""
        changed = self._folder.stat().st_mtime_ns
        if changed != self._changed:
            files = [*self._folder.glob("node_*.pub"), *self._folder.glob("node_*.revoked")]
            read = (
                (_pem(path), (f"device {path.stem.removeprefix('node_')}", path.suffix != ".pub")) for path in files
            )
            self._keys, self._changed = {pem: what for pem, what in read if pem}, changed
        return self._keys


def _pem(path: Path) -> bytes:
    """A public key as SuperNodes send it. Empty if the file cannot be read."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return b""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem: bytes = key.public_bytes(serialization.Encoding.PEM, form)
    return pem


def _signed(pem: bytes, message: bytes, signature: bytes) -> bool:
    key = serialization.load_pem_public_key(pem)
    try:
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


class HourlyLimit:
    """Counts lines. At most ``MAX_LINES_PER_HOUR`` per hour may be written."""

    def __init__(self) -> None:
        self._since, self._passed = time.monotonic(), 0

    def allows_another(self) -> bool:
        if time.monotonic() - self._since >= 3600:
            self._since, self._passed = time.monotonic(), 0
        self._passed += 1
        return self._passed <= MAX_LINES_PER_HOUR


class AccessLog:
    """``access.log``: a line per login, change of address, refusal and revocation."""

    def __init__(self, path: Path) -> None:
        self._path, self._limit = path, HourlyLimit()
        self._addresses: dict[str, tuple[str, float]] = {}

    def write(self, text: str) -> None:
        """Add a line, unless there were too many in this hour."""
        if self._limit.allows_another():
            add_line(self._path, text)

    def record_call(self, name: str, address: str, login: bool) -> None:
        """A device has called. Its key may be used at one address at a time."""
        before, since = self._addresses.get(name, (address, 0.0))
        self._addresses[name] = (address, time.monotonic())
        if before != address and time.monotonic() - since < ADDRESS_SECONDS:
            self.write(f"{name}: its key is used at {address}, and a moment ago at {before}")
        elif login:
            self.write(f"{name}: login from {address}")


def add_line(path: Path, text: str) -> None:
    """Add a line with the time to a log of a deployment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{at} {text}\n")
