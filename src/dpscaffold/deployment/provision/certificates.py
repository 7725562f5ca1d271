"""The federation's certificate authority and the server's certificate."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dpscaffold.deployment.provision.keys import PEM, private_pem, write_secret
from dpscaffold.errors import BadInput

_DAY = datetime.timedelta(days=1)
#: For how many days certificates are valid: the longest that common systems accept of a server's.
CERTIFICATE_DAYS = 825
#: Certificates that end within this many days are warned of.
WARNED_DAYS = 60


def make_ca(
    folder: Path, days: int, kept: ec.EllipticCurvePrivateKey | None = None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The authority's certificate, with a new key or with the one that is ``kept``."""
    key = kept or ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dpscaffold federation")])
    certificate = (
        _begun(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    if kept is None:
        write_secret(folder / "ca.key", private_pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(PEM))
    return key, certificate


def make_certificate(
    folder: Path,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    hosts: Sequence[str],
    days: int,
) -> None:
    """The server's certificate, for its public names and for loopback (where its own processes
    connect)."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general_name(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _begun(subject, ca.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    write_secret(folder / "server.key", private_pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(PEM))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + days * _DAY)
    )


def _signs_certificates() -> x509.KeyUsage:
    used = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **used)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def check_certificate(path: Path) -> x509.Certificate:
    """A certificate that is readable and valid today, or a refusal."""
    try:
        certificate = certificate_in(path.read_bytes(), path)
    except OSError as error:
        raise BadInput("file-unreadable", f"{path} cannot be read: {error.strerror}") from error
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise BadInput(
            "certificate-expired",
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; renew it with "
            f"dpscaffold provision renew",
        )
    return certificate


def certificate_in(content: bytes, path: Path) -> x509.Certificate:
    """The certificate in PEM of a file, or a refusal that names the file."""
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise BadInput("not-a-certificate", f"{path} is not a certificate in PEM") from error


def names_in(path: Path) -> tuple[str, ...]:
    """The hosts of the server's certificate."""
    found = certificate_in(path.read_bytes(), path).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    return tuple(str(name.value) for name in found.value)


def days_left(path: Path) -> int | None:
    """The days until a certificate ends, if they are few enough to warn of."""
    ends = certificate_in(path.read_bytes(), path).not_valid_after_utc
    left = (ends - datetime.datetime.now(datetime.UTC)) // _DAY
    return max(0, left) if left <= WARNED_DAYS else None
