"""Certificates for mutual TLS: an authority, a hub, its clients, and clusters.

A hub's folder and the folder of each client look alike:

    ca.pem     certificate of the authority, by which all others are checked
    cert.pem   certificate of this machine
    key.pem    its private key: readable by the owner alone

A hub's folder also has `ca-key.pem`, with which certificates are made, `clients.json`
with the names of the clients that the hub takes, and `clients/NAME`, the folder to copy
to each client. The folder of a cluster is the same on all hosts.

Needs the package `cryptography`, of the optional dependencies `tfgradcomp[federated]`.
"""

from __future__ import annotations

from tfgradcomp.certificates.check import Identity, check
from tfgradcomp.certificates.files import CA, CERTIFICATE, KEY
from tfgradcomp.certificates.folders import (
    DAYS,
    accepted_clients,
    add_client,
    create,
    create_for_cluster,
    remove_client,
    set_hosts,
)
from tfgradcomp.certificates.signing import CLIENT, SERVER

__all__ = [
    "CA",
    "CERTIFICATE",
    "CLIENT",
    "DAYS",
    "KEY",
    "SERVER",
    "Identity",
    "accepted_clients",
    "add_client",
    "check",
    "create",
    "create_for_cluster",
    "remove_client",
    "set_hosts",
]
