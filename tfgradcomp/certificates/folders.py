"""Folders of a hub, of its clients and of a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfgradcomp.certificates.files import CA, CA_KEY, parsed, read, write
from tfgradcomp.certificates.signing import (
    CLIENT,
    SERVER,
    cryptography,
    new_authority,
    write_identity,
    write_key,
)

DAYS = 365
"""Default lifetime of a certificate, in days."""

_NAMES, _CLIENTS = "clients.json", "clients"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def create(
    folder: str | Path, hosts: Sequence[str], clients: Iterable[str] = (), days=DAYS
) -> None:
    """Makes an authority, a hub's certificate and one for each client.

    Args:
        folder: A new folder, for the hub. Copy `folder/clients/NAME` to each client;
            keep all else, above all `ca-key.pem`, on the hub.
        hosts: The names and addresses by which clients reach the hub.
        clients: The clients' names.
        days: Lifetime of the hub's and the clients' certificates.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the folder has files already, or for a wrong name.

    Example:
        ```python
        from tfgradcomp import certificates

        certificates.create("hub", hosts=["hub.example.org"], clients=["anna", "ben"])
        ```
    """
    clients = [_checked_name(name) for name in clients]
    _check_hosts(hosts)
    folder = _new_folder(folder)
    ca_key, ca = new_authority("tfgradcomp hub")
    write_key(folder / CA_KEY, ca_key)
    write_identity(folder, ca_key, ca, "hub", (SERVER,), days, hosts)
    write(folder / _NAMES, b"{}")
    for name in clients:
        add_client(folder, name, days)


def set_hosts(folder: str | Path, hosts: Sequence[str], days: float = DAYS) -> None:
    """Makes a new certificate for the hub: for other names, or for another year.

    Args:
        folder: The hub's folder.
        hosts: The names and addresses by which clients reach the hub.
        days: Lifetime of the certificate.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the folder is not a hub's.
    """
    _check_hosts(hosts)
    write_identity(Path(folder), *_authority(folder), "hub", (SERVER,), days, hosts)


def add_client(folder: str | Path, name: str, days: float = DAYS) -> Path:
    """Makes a certificate for a client, or renews it; returns the client's folder.

    Args:
        folder: The hub's folder.
        name: The client's name. A removed client's name is not taken again, because
            its old certificate may still exist.
        days: Lifetime of the certificate.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the name is wrong or that of a removed client, or if the folder
            is not a hub's.
    """
    names = _names(folder)
    if not names.get(_checked_name(name), True):
        raise ValueError(
            "The client was removed, and its old certificate may still exist. Give it "
            f"another name. Received: name={name!r}"
        )
    to = Path(folder, _CLIENTS, name)
    for path in (to.parent, to):
        path.mkdir(mode=0o700, exist_ok=True)
    write_identity(to, *_authority(folder), name, (CLIENT,), days)
    write(Path(folder, _NAMES), json.dumps({**names, name: True}, indent=1).encode())
    return to


def remove_client(folder: str | Path, name: str) -> None:
    """Makes the hub refuse a client, whose certificate stays valid otherwise.

    Raises:
        ValueError: If the hub does not know the client.
    """
    names = _names(folder)
    if name not in names:
        raise ValueError(
            f"No client of {folder} has this name. Its clients: "
            f"{', '.join(accepted_clients(folder)) or 'none'}. Received: name={name!r}"
        )
    write(Path(folder, _NAMES), json.dumps({**names, name: False}, indent=1).encode())


def accepted_clients(folder: str | Path) -> list[str]:
    """Returns the names of the clients that the hub takes, read anew from its folder.

    Raises:
        ValueError: If the folder is not a hub's.
    """
    return sorted(name for name, is_accepted in _names(folder).items() if is_accepted)


def create_for_cluster(folder: str | Path, days: float = DAYS) -> None:
    """Makes one certificate for all hosts of a cluster, to be copied to each.

    Hosts of a cluster run code for each other, so one key protects as well as several.
    The authority's key is not kept: nobody can make another certificate.

    Args:
        folder: A new folder.
        days: Lifetime of the certificate.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the folder has files already.
    """
    folder = _new_folder(folder)
    authority = new_authority("tfgradcomp cluster")
    write_identity(folder, *authority, "cluster", (SERVER, CLIENT), days)


def _check_hosts(hosts: Sequence[str]) -> None:
    if isinstance(hosts, str) or not hosts:
        raise ValueError(
            "A hub needs a list of the names or addresses by which its clients reach "
            f"it, such as ['hub.example.org']. Received: hosts={hosts!r}"
        )


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            "A client's name has letters, digits, '.', '_' and '-', begins with a "
            f"letter or digit, and is not longer than 63. Received: name={name!r}"
        )
    return name


def _authority(folder: str | Path) -> tuple[Any, Any]:
    """Returns the key and the certificate of a hub's authority."""
    x = cryptography()
    key = parsed(Path(folder, CA_KEY), x.keys.load_pem_private_key, None)
    return key, parsed(Path(folder, CA), x.x509.load_pem_x509_certificate)


def _names(folder: str | Path) -> dict[str, bool]:
    return json.loads(read(Path(folder, _NAMES)))


def _new_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} has files, which new keys would replace. Name a new folder. "
            f"Received: folder={str(folder)!r}"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder
