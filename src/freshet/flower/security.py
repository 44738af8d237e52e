"""Keys, certificates and tokens of a deployment. Existing files are never overwritten; private ones have mode 0600.

A device requests the fresh model with the token of its trip: ``HMAC-SHA256(key, node : device : trip : ticket)``. Only
the server has the key. The token may be used repeatedly (after a lost answer) and is worthless once the trip has ended.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from freshet.errors import RunError
from freshet.files import replacing

CERTIFICATE_YEARS = 10
#: Certificates are valid from this long before they are made, because clocks differ.
CLOCK_TOLERANCE = timedelta(days=1)
#: How long before it ends a certificate's end is announced.
EXPIRY_NOTICE = timedelta(days=30)


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise RunError(f"{path} exists and is not overwritten") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_authority(folder: Path) -> None:
    """Make ``ca.key`` and ``ca.crt`` unless ``ca.crt`` exists. The key may be kept elsewhere."""
    if (folder / "ca.crt").exists():
        return
    for other in ("ca.key", "server.key"):
        _require_absent(folder / other, "ca.crt", "restore it: every device has a copy")
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("freshet deployment")
    certificate = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _pem(key))
    _publish(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_server(folder: Path, hosts: list[str]) -> None:
    """Make ``server.key`` and ``server.crt`` for these hosts, signed by the authority, unless they exist."""
    has_key, has_certificate = ((folder / name).exists() for name in ("server.key", "server.crt"))
    if has_key and has_certificate:
        return
    if not has_key:
        _require_absent(folder / "server.crt", "server.key", "restore it, or remove server.crt to make both again")
    if not (folder / "ca.key").exists():
        raise RunError(f"{folder / 'ca.key'} is missing and must sign server.crt; restore it for this command")
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    signer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    if not has_key:
        write_secret(folder / "server.key", _pem(ec.generate_private_key(ec.SECP384R1())))
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey) and isinstance(key, ec.EllipticCurvePrivateKey)
    public = authority.public_key()
    certificate = (
        _certificate(_name(hosts[0]), signer.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(authority, hashes.SHA384())
    )
    _publish(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))


def check_validity(certificate: Path, now: datetime | None = None) -> str:
    """Raise if a certificate is not valid by this machine's clock. Returns a notice if it will end soon, else ""."""
    found, now = x509.load_pem_x509_certificate(certificate.read_bytes()), now or datetime.now(UTC)
    start, end = found.not_valid_before_utc, found.not_valid_after_utc
    if now < start:
        raise RunError(
            f"{certificate} is valid from {start:%Y-%m-%d %H:%M}, but the clock of this machine says "
            f"{now:%Y-%m-%d %H:%M} (UTC); set the clock"
        )
    remedy = f"move {certificate.name} and its key away, and run freshet deploy init again"
    if now > end:
        raise RunError(
            f"{certificate} ended on {end:%Y-%m-%d}, or the clock of this machine is wrong ({now:%Y-%m-%d %H:%M} UTC); "
            f"set the clock, or {remedy}"
        )
    return f"{certificate} ends on {end:%Y-%m-%d}; {remedy}" if now > end - EXPIRY_NOTICE else ""


def _require_absent(existing: Path, missing: str, remedy: str) -> None:
    """Raise if a file exists that a new ``missing`` file would not match."""
    if existing.exists():
        raise RunError(
            f"{existing.with_name(missing)} is missing beside {existing.name}, and a new one would not match; {remedy}"
        )


def make_node(path: Path) -> None:
    """Make a node's private key at ``path`` and its public key at ``path.pub``, in OpenSSH format, unless they exist.

    If only the public key exists, the private key has moved to its device. ``path.revoked`` is a revoked key.
    """
    public = path.with_name(f"{path.name}.pub")
    if public.exists() or public.with_suffix(".revoked").exists():
        return
    form, openssh, pem = serialization.PublicFormat.OpenSSH, serialization.Encoding.OpenSSH, serialization.Encoding.PEM
    if not path.exists():
        new, plain = ec.generate_private_key(ec.SECP384R1()), serialization.NoEncryption()
        write_secret(path, new.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain))
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RunError(f"{path} cannot be read as a key ({error}); remove it to make a new one") from None
    _publish(public, key.public_key().public_bytes(openssh, form) + b"\n")


def _publish(path: Path, content: bytes) -> None:
    """Write a new file that all may read, atomically."""
    with replacing(path) as file:
        file.write(content)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(now + timedelta(days=365 * CERTIFICATE_YEARS))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, open_ = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, form, open_)
    return pem


KEY_BYTES = 32


def new_ticket() -> str:
    """Return a unique name for a session. It is not a secret."""
    return secrets.token_hex(16)


def trip_ticket(session: str, device: int, trip: int, version: int) -> str:
    """Return the name of a trip, the same after a restart of the server. It is not a secret."""
    return hashlib.sha256(f"{session}:{device}:{trip}:{version}".encode()).hexdigest()[:32]


class Tokens:
    """Makes and checks tokens."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @staticmethod
    def load(path: Path | None) -> "Tokens":
        """Read the key from a file, made on first use, so that tokens outlive the process. Without path: a new key."""
        if path is None:
            return Tokens(secrets.token_bytes(KEY_BYTES))
        if not path.exists():
            write_secret(path, secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
        if len(key) < KEY_BYTES:
            raise RunError(f"{path} is too short to be a key; remove it to make a new one")
        return Tokens(key)

    def make(self, node: int, device: int, trip: int, ticket: str) -> str:
        """Return the token of a trip."""
        return hmac.new(self._key, f"{node}:{device}:{trip}:{ticket}".encode(), hashlib.sha256).hexdigest()

    def fits(self, token: object, node: int, device: int, trip: int, ticket: str) -> bool:
        """Whether this is the token of the trip, compared in constant time."""
        given = token.encode(errors="replace") if isinstance(token, str) else b""
        return hmac.compare_digest(given, self.make(node, device, trip, ticket).encode())
