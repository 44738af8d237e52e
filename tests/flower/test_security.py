"""A token is valid for its node and trip only."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from freshet.errors import RunError
from freshet.flower.security import Tokens, check_validity, make_authority, new_ticket, trip_ticket

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


def test_ticket_names_one_trip_and_survives_a_restart() -> None:
    assert trip_ticket("s", 1, 2, 3) == trip_ticket("s", 1, 2, 3)
    others = {trip_ticket(*other) for other in [("t", 1, 2, 3), ("s", 2, 2, 3), ("s", 1, 3, 3), ("s", 1, 2, 4)]}
    assert len(others) == 4 and trip_ticket("s", 1, 2, 3) not in others


def test_key_outlives_the_process_and_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    token = Tokens.load(path).make(1, 2, 3, "t")
    assert Tokens.load(path).fits(token, 1, 2, 3, "t")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"short")
    with pytest.raises(RunError, match="too short"):
        Tokens.load(path)


# ---- certificates and clocks


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    return tmp_path / "ca.crt"


def test_certificate_is_valid_a_day_before_it_is_made(certificate: Path) -> None:
    """A device whose clock was an hour behind could not connect."""
    assert check_validity(certificate, datetime.now(UTC) - timedelta(hours=23)) == ""


def test_clock_before_the_certificate_is_named(certificate: Path) -> None:
    with pytest.raises(RunError, match=r"but the clock of this machine says .* \(UTC\); set the clock$"):
        check_validity(certificate, datetime.now(UTC) - timedelta(days=2))


def test_end_of_a_certificate_is_told_30_days_ahead(certificate: Path) -> None:
    end = datetime.now(UTC) + timedelta(days=3650)
    assert check_validity(certificate, end - timedelta(days=31)) == ""
    assert "ends on 20" in check_validity(certificate, end - timedelta(days=29))
    with pytest.raises(RunError, match="or the clock of this machine is wrong"):
        check_validity(certificate, end + timedelta(days=1))
