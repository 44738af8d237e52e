"""Who may ask for the fresh model: a token per trip, made from a key that only the server has.

``token = HMAC-SHA256(key, node : device : trip : ticket)``. It is bound to a node and a trip, may be used again (a lost
answer is asked for again), and is of no use once the trip has ended, since then nobody compares with it any more.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from freshet.errors import RunError
from freshet.flower.keys import write_secret

KEY_BYTES = 32


def new_ticket() -> str:
    """A name for one trip that no other trip ever has; no secret."""
    return secrets.token_hex(16)


class Tokens:
    """Makes and checks tokens."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @staticmethod
    def stored(path: Path | None) -> "Tokens":
        """With the key of a file, made on first use, so that tokens outlive the process; without one, a new key."""
        if path is None:
            return Tokens(secrets.token_bytes(KEY_BYTES))
        if not path.exists():
            write_secret(path, secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
        if len(key) < KEY_BYTES:
            raise RunError(f"{path} is too short to be a key; remove it, and a new one is made")
        return Tokens(key)

    def make(self, node: int, device: int, trip: int, ticket: str) -> str:
        """The token of one trip."""
        return hmac.new(self._key, f"{node}:{device}:{trip}:{ticket}".encode(), hashlib.sha256).hexdigest()

    def fits(self, token: object, node: int, device: int, trip: int, ticket: str) -> bool:
        """Whether a token is the one of this trip, in a time that tells nothing about it."""
        given = token.encode(errors="replace") if isinstance(token, str) else b""
        return hmac.compare_digest(given, self.make(node, device, trip, ticket).encode())
