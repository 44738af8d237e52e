"""A token is valid for its node and trip only."""

import stat
from pathlib import Path

import pytest

from freshet.errors import RunError
from freshet.flower.security import Tokens, new_ticket

TOKENS = Tokens(b"k" * 32)


def test_token_fits_its_trip_repeatedly() -> None:
    token = TOKENS.make(7, 1, 2, "ticket")
    assert TOKENS.fits(token, 7, 1, 2, "ticket") and TOKENS.fits(token, 7, 1, 2, "ticket")


@pytest.mark.parametrize("other", [(8, 1, 2, "ticket"), (7, 0, 2, "ticket"), (7, 1, 3, "ticket"), (7, 1, 2, "other")])
def test_token_fits_no_other_node_device_trip_or_ticket(other: tuple[int, int, int, str]) -> None:
    assert not TOKENS.fits(TOKENS.make(7, 1, 2, "ticket"), *other)


@pytest.mark.parametrize("token", ["", None, 3, b"x", "é" * 64, "\ud800"])
def test_invalid_token_fits_nothing(token: object) -> None:
    assert not TOKENS.fits(token, 7, 1, 2, "ticket")


def test_other_key_makes_other_tokens() -> None:
    assert not Tokens(b"x" * 32).fits(TOKENS.make(7, 1, 2, "t"), 7, 1, 2, "t")
    assert new_ticket() != new_ticket()


def test_key_outlives_the_process_and_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    token = Tokens.load(path).make(1, 2, 3, "t")
    assert Tokens.load(path).fits(token, 1, 2, 3, "t")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"short")
    with pytest.raises(RunError, match="too short"):
        Tokens.load(path)
