"""The folder of a deployment: files are never overwritten, and secrets are readable by their owner only."""

import ipaddress
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from freshet.errors import ConfigError, RunError
from freshet.flower import commands
from freshet.flower.folder import Folder, init, update_app

TABLES = {"method": {"name": "fedasmu"}, "fleet": {"devices": 2}, "run": {"until": 60.0}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return init(tmp_path_factory.mktemp("d"), TABLES, ["fl.example.org", "10.0.0.7"])


def test_secrets_are_readable_by_their_owner_only(made: Folder) -> None:
    secrets = [made.certificates / "ca.key", made.certificates / "server.key", made.key(0), made.key(1)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600] * 4


def test_certificate_has_all_names_and_is_signed_by_the_authority(made: Folder) -> None:
    server = x509.load_pem_x509_certificate((made.certificates / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((made.certificates / "ca.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost"}
    addresses = {ipaddress.ip_address("10.0.0.7"), ipaddress.ip_address("127.0.0.1")}
    assert set(names.get_values_for_type(x509.IPAddress)) == addresses


def test_node_keys_are_p384_in_openssh_format(made: Folder) -> None:
    private = serialization.load_ssh_private_key(made.key(0).read_bytes(), None)
    public = serialization.load_ssh_public_key(Path(f"{made.key(0)}.pub").read_bytes())
    assert private.public_key() == public and public.curve.name == "secp384r1"


def test_second_init_adds_missing_files_and_changes_nothing(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    init(tmp_path, TABLES | {"fleet": {"devices": 3}}, ["other"])
    assert {path: path.read_bytes() for path in before} == before
    assert folder.key(2).is_file()


def test_moved_and_revoked_keys_are_not_made_again(tmp_path: Path) -> None:
    """The README advises to move private keys. A revoked device stays revoked."""
    folder = init(tmp_path, TABLES, [])
    folder.key(0).unlink()
    commands.revoke(folder, 1)
    folder.key(1).unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    init(tmp_path, TABLES, [])
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == before
    assert set(before) == {"node_0.pub", "node_1.revoked"}


def test_missing_files_are_derived_from_their_keys(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    public = Path(f"{folder.key(1)}.pub")
    before = public.read_bytes()
    public.unlink()
    (folder.certificates / "server.crt").unlink()
    init(tmp_path, TABLES, ["fl.example.org"])
    assert public.read_bytes() == before
    server = x509.load_pem_x509_certificate((folder.certificates / "server.crt").read_bytes())
    key = serialization.load_pem_private_key((folder.certificates / "server.key").read_bytes(), None)
    assert server.public_key() == key.public_key()
    server.verify_directly_issued_by(x509.load_pem_x509_certificate((folder.certificates / "ca.crt").read_bytes()))
    public.unlink()
    folder.key(1).write_bytes(b"no key")
    with pytest.raises(RunError, match=r"node_1 cannot be read as a key"):
        init(tmp_path, TABLES, [])


@pytest.mark.parametrize(
    ("gone", "sentence"),
    [
        (["ca.crt"], r"ca\.crt is missing beside ca\.key"),
        (["ca.crt", "ca.key"], r"ca\.crt is missing beside server\.key"),
        (["server.key"], r"server\.key is missing beside server\.crt"),
        (["ca.key", "server.key", "server.crt"], r"ca\.key is missing"),
        (["ca.key", "server.crt"], r"ca\.key is missing"),
    ],
)
def test_certificates_that_would_not_match_are_not_made(tmp_path: Path, gone: list[str], sentence: str) -> None:
    folder = init(tmp_path, TABLES, [])
    for name in gone:
        (folder.certificates / name).unlink()
    before = {path.name: path.read_bytes() for path in folder.certificates.iterdir()}
    with pytest.raises(RunError, match=sentence):
        init(tmp_path, TABLES, [])
    assert {path.name: path.read_bytes() for path in folder.certificates.iterdir()} == before


def test_authority_key_may_be_kept_elsewhere(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    (folder.certificates / "ca.key").unlink()
    before = (folder.certificates / "ca.crt").read_bytes()
    init(tmp_path, TABLES | {"fleet": {"devices": 3}}, [])
    assert (folder.certificates / "ca.crt").read_bytes() == before and folder.key(2).is_file()
    assert not (folder.certificates / "ca.key").exists()


def test_server_listens_on_loopback_unless_a_host_is_named(made: Folder, tmp_path: Path) -> None:
    assert init(tmp_path, TABLES, []).server().bind == "127.0.0.1"
    assert (made.server().bind, made.server().host) == ("0.0.0.0", "fl.example.org")
    assert made.device().superlink == "fl.example.org:18000"


def test_invalid_setting_is_one_sentence(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    (tmp_path / "server.toml").write_text("[server]\nport = 0\n")
    with pytest.raises(ConfigError, match=r"server\.port"):
        folder.server()
    with pytest.raises(RunError, match="is not a deployment"):
        Folder(tmp_path / "elsewhere").check()


def test_app_gets_the_changed_configuration(tmp_path: Path) -> None:
    folder = init(tmp_path, TABLES, [])
    text = (tmp_path / "federation.toml").read_text()
    (tmp_path / "federation.toml").write_text(text.replace("until = 60.0", "until = 90.0"))
    assert update_app(folder)["run"]["until"] == 90.0
    assert "until = 90.0" in (folder.app / "freshet_app" / "federation.toml").read_text()
