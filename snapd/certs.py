"""A private CA with certificates for one daemon and its clients, for a set-up to try TLS with.

The CA's key lies beside the certificates, which is fine for trying. A site with a CA of its own uses that.

Source: design, section 5.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapd.errors import ConfigError, ExtraMissing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

NAME_CHARS_MAX: Final = 64
# Names are files, stand in TOML, and are patterns in access rules: a client named "*" would be everybody.
# Colons are for IPv6.
_NAME: Final = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]*")
# A clock that is a little behind must not refuse a new certificate.
_BACKDATED: Final = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Made:
    """Paths of what was written: PEM files, keys with mode 0600."""

    ca: Path
    certificates: dict[str, tuple[Path, Path]]


def make_certificates(directory: Path, servers: Sequence[str], clients: Sequence[str], days: int) -> Made:
    """Write a CA, one certificate for the daemon and one for each client.

    Args:
        directory: made if it is not there; nothing in it is overwritten.
        servers: names and addresses under which clients reach the daemon.
        clients: names that ``[[access]]`` tables know them by.
        days: how long they are valid.

    Raises:
        ExtraMissing: the package ``cryptography`` is not installed.
        ConfigError: a file is there already, cannot be written, or a name cannot be used.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ExtraMissing("certificates are made with a package: pip install 'kv-snapd[tls]'") from error
    for name in (*servers, *clients):
        if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name for a certificate: up to {NAME_CHARS_MAX} letters, digits, dots and "
                "hyphens, such as d-0"
            )
    if len({*clients, "server", "ca"}) != len(clients) + 2:
        raise ConfigError("every client needs a name of its own, other than server and ca")
    files = {
        name: (directory / f"{name}.pem", directory / f"{name}.key") for name in ("ca", "server", *clients)
    }
    there = [path for pair in files.values() for path in pair if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(f"{there[0]} is there already: choose another directory, or remove it")
    maker = _Maker(days)
    contents = [(files["ca"], maker.ca, maker.ca_key)]
    contents.append((files["server"], *maker.issue(servers[0], _names(servers), is_server=True)))
    contents += [(files[name], *maker.issue(name, _names([name]), is_server=False)) for name in clients]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for (certificate_path, key_path), certificate, key in contents:
            _write(key_path, _key_bytes(key), 0o600)
            _write(certificate_path, _certificate_bytes(certificate), 0o644)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror}") from None
    return Made(files["ca"][0], {name: pair for name, pair in files.items() if name != "ca"})


class _Maker:
    """A CA that signs for as long as it is in memory."""

    def __init__(self, days: int) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._until = datetime.timedelta(days=days)
        self.ca_key = ec.generate_private_key(ec.SECP256R1())
        self.ca = self._sign(
            "snapd test CA", self.ca_key, [(x509.BasicConstraints(ca=True, path_length=0), True),
                                           (_usage(is_ca=True), True)],
        )  # fmt: skip

    def issue(
        self, name: str, names: "list[x509.GeneralName]", *, is_server: bool
    ) -> "tuple[x509.Certificate, EllipticCurvePrivateKey]":
        """Return a certificate and its key."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(is_ca=False), True),
            (x509.SubjectAlternativeName(names), False),
            (x509.ExtendedKeyUsage([purpose]), False),
        ]
        return self._sign(name, key, extensions), key

    def _sign(
        self, name: str, key: "EllipticCurvePrivateKey", extensions: "list[tuple[x509.ExtensionType, bool]]"
    ) -> "x509.Certificate":
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = subject if key is self.ca_key else self.ca.subject
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + self._until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca_key.public_key()), critical=False
            )
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self.ca_key, hashes.SHA256())


def _usage(*, is_ca: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _names(names: Sequence[str]) -> "list[x509.GeneralName]":
    from cryptography import x509

    general: list[x509.GeneralName] = []
    for name in names:
        try:
            general.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            general.append(x509.DNSName(name))
    return general


def _key_bytes(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _certificate_bytes(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _write(path: Path, content: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
