"""Checks of a folder before a connection is made."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

from tfgradcomp.certificates.files import CA, CERTIFICATE, KEY, parsed, read
from tfgradcomp.certificates.signing import cryptography, roles_of


class Identity(NamedTuple):
    """The checked files of a folder.

    Attributes:
        name: Name in the certificate.
        ca: The authority's certificate, PEM.
        certificate: The certificate, PEM.
        key: The private key, PEM.
    """

    name: str
    ca: bytes
    certificate: bytes
    key: bytes


def check(folder: str | Path, *roles: str) -> Identity:
    """Checks all that can be seen of a folder before a connection; returns its files.

    Args:
        folder: Folder of a hub, a client or a cluster.
        *roles: `"server"`, `"client"` or both: the purposes of the certificate.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If a file is missing or damaged, if the key is readable by others or
            belongs to another certificate, or if a certificate is expired, not valid
            yet, of another authority, or for another purpose. Names the file.
    """
    x = cryptography()
    ca_path, path, key_path = (Path(folder, name) for name in (CA, CERTIFICATE, KEY))
    ca, certificate = (
        parsed(each, x.x509.load_pem_x509_certificate) for each in (ca_path, path)
    )
    key = parsed(key_path, x.keys.load_pem_private_key, None)
    _check_private(key_path)
    _check_dates(ca_path, ca)
    _check_dates(path, certificate)
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, x.InvalidSignature):
        raise ValueError(
            f"{path} was not made by the authority of {ca_path}. Copy all three files "
            f"from the same folder again. Received: folder={str(folder)!r}"
        ) from None
    if key.public_key() != certificate.public_key():
        raise ValueError(
            f"{key_path} is not the key of {path}. Copy all three files from the same "
            f"folder again. Received: folder={str(folder)!r}"
        )
    for role in roles:
        if role not in roles_of(certificate):
            raise ValueError(
                f"{path} is not for a {role}. A hub takes the folder that `create` "
                "made, a client a folder below its `clients`, and a cluster's launcher "
                f"that of `create_for_cluster`. Received: folder={str(folder)!r}"
            )
    names = certificate.subject.get_attributes_for_oid(x.x509.NameOID.COMMON_NAME)
    name = str(names[0].value) if names else ""
    return Identity(name, *(read(each) for each in (ca_path, path, key_path)))


def _check_private(path: Path) -> None:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(
            f"{path} can be read by others, who could pose as this machine. Run "
            f"`chmod 600 {path}`. Received: mode={mode:o}"
        )


def _check_dates(path: Path, certificate) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ValueError(
            f"{path} has expired. Make a new certificate where the authority is, and "
            f"copy it here. Received: valid until {end}, now {now:%F %T}"
        )
    if now < begin:
        raise ValueError(
            f"{path} is not valid yet. Set this machine's clock, or wait. Received: "
            f"valid from {begin}, now {now:%F %T}"
        )
