"""Keys and certificates, made with the package `cryptography`."""

from __future__ import annotations

import datetime
import importlib
import inspect
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tfgradcomp.certificates.files import CA, CERTIFICATE, KEY, write

SERVER, CLIENT = "server", "client"
"""Roles: the purposes of a certificate."""

_CA_DAYS = 3650
# The clocks of two machines differ.
_EARLIER = datetime.timedelta(hours=1)


def cryptography() -> Any:
    """Returns what this package uses of `cryptography`, imported now.

    Raises:
        ImportError: If it is not installed.
    """
    load = importlib.import_module
    primitives = "cryptography.hazmat.primitives"
    try:
        return SimpleNamespace(
            x509=load("cryptography.x509"),
            InvalidSignature=load("cryptography.exceptions").InvalidSignature,
            sha256=load(f"{primitives}.hashes").SHA256(),
            keys=load(f"{primitives}.serialization"),
            ec=load(f"{primitives}.asymmetric.ec"),
        )
    except ImportError:
        raise ImportError(
            "Certificates need the package cryptography, which is not installed. Run: "
            "pip install 'tfgradcomp[federated]'"
        ) from None


def new_authority(name: str) -> tuple[Any, Any]:
    """Returns the key and the certificate of a new authority."""
    x = cryptography()
    key = x.ec.generate_private_key(x.ec.SECP256R1())
    subject = _subject(x, name)
    usages = inspect.signature(x.x509.KeyUsage).parameters
    usage = x.x509.KeyUsage(**{name: name == "key_cert_sign" for name in usages})
    builder = (
        _builder(x, subject, subject, key.public_key(), key.public_key(), _CA_DAYS)
        .add_extension(x.x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(usage, True)
    )
    return key, builder.sign(key, x.sha256)


def write_identity(
    folder: Path,
    ca_key: Any,
    ca: Any,
    name: str,
    roles: Iterable[str],
    days: float,
    hosts: Iterable[str] = (),
) -> None:
    """Writes a key, its certificate, and the certificate of its authority."""
    x = cryptography()
    key = x.ec.generate_private_key(x.ec.SECP256R1())
    public = key.public_key()
    subject = _subject(x, name)
    purposes = [_purpose(x, role) for role in roles]
    builder = (
        _builder(x, subject, ca.subject, public, ca_key.public_key(), days)
        .add_extension(x.x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x.x509.ExtendedKeyUsage(purposes), False)
    )
    if names := [_general_name(x, host) for host in hosts]:
        builder = builder.add_extension(x.x509.SubjectAlternativeName(names), False)
    write_key(folder / KEY, key)
    _write_certificate(x, folder / CERTIFICATE, builder.sign(ca_key, x.sha256))
    _write_certificate(x, folder / CA, ca)


def roles_of(certificate) -> set[str]:
    """Returns the purposes that a certificate allows; all, if it names none."""
    x = cryptography()
    try:
        allowed = certificate.extensions.get_extension_for_class(
            x.x509.ExtendedKeyUsage
        ).value
    except x.x509.ExtensionNotFound:
        return {SERVER, CLIENT}
    return {role for role in (SERVER, CLIENT) if _purpose(x, role) in allowed}


def _builder(x, subject, issuer, public, issuer_public, days):
    now = datetime.datetime.now(datetime.timezone.utc)
    key_id = x.x509.SubjectKeyIdentifier.from_public_key(public)
    issuer_id = x.x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_public)
    return (
        x.x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x.x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(key_id, False)
        .add_extension(issuer_id, False)
    )


def _subject(x, name):
    return x.x509.Name([x.x509.NameAttribute(x.x509.NameOID.COMMON_NAME, name)])


def _purpose(x, role):
    oids = x.x509.ExtendedKeyUsageOID
    return {SERVER: oids.SERVER_AUTH, CLIENT: oids.CLIENT_AUTH}[role]


def _general_name(x, host):
    try:
        return x.x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x.x509.DNSName(host)


def write_key(path: Path, key: Any) -> None:
    """Writes a private key, without a password."""
    x = cryptography()
    form, no_password = x.keys.PrivateFormat.PKCS8, x.keys.NoEncryption()
    write(path, key.private_bytes(x.keys.Encoding.PEM, form, no_password))


def _write_certificate(x, path, certificate):
    write(path, certificate.public_bytes(x.keys.Encoding.PEM))
