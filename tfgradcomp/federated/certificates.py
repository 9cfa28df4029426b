"""Mutual TLS between a hub and its clients: credentials for gRPC.

`tfgradcomp.certificates` makes the folders that these functions take.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import grpc

from tfgradcomp.addresses import split_address
from tfgradcomp.certificates import CA, CERTIFICATE, CLIENT, KEY, SERVER, check
from tfgradcomp.certificates import accepted_clients as accepted_clients
from tfgradcomp.certificates import add_client as add_client
from tfgradcomp.certificates import create as create
from tfgradcomp.certificates import remove_client as remove_client
from tfgradcomp.certificates import set_hosts as set_hosts

# OpenSSL's numbers of the reasons for which a certificate is refused.
_REASONS = {
    9: "is not valid yet: set the clock of this machine and of the hub",
    10: "has expired: make a new one on the hub, with `certificates.set_hosts`",
    18: "is of another authority: copy this client's folder from the hub again",
    19: "is of another authority: copy this client's folder from the hub again",
    20: "is of another authority: copy this client's folder from the hub again",
    62: "is for other names: name them on the hub, with `certificates.set_hosts`",
    64: "is for other names: name them on the hub, with `certificates.set_hosts`",
}


def server_credentials(folder: str | Path) -> grpc.ServerCredentials:
    """Returns a hub's credentials; clients need a certificate of its authority.

    Args:
        folder: The hub's folder.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the certificate cannot be used. Names the file.
    """
    identity = check(folder, SERVER)
    return grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        root_certificates=identity.ca,
        require_client_auth=True,
    )


def channel_credentials(folder: str | Path) -> grpc.ChannelCredentials:
    """Returns a client's credentials; the hub must have the name that is called.

    Args:
        folder: The client's folder.

    Raises:
        ImportError: If `cryptography` is not installed.
        ValueError: If the certificate cannot be used. Names the file.
    """
    identity = check(folder, CLIENT)
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)


def peer_name(context: grpc.ServicerContext) -> str:
    """Returns the name in the certificate of the client that calls; else ""."""
    names = context.auth_context().get("x509_common_name", [])
    return names[0].decode() if names else ""


def check_hub(folder: str | Path, address: str, seconds: float = 5.0) -> None:
    """Connects to a hub once, to say why it cannot be used: gRPC says too little.

    Args:
        folder: The client's folder.
        address: Address of the hub, `"host:port"`.
        seconds: Time for the hub to answer.

    Raises:
        ConnectionError: If there is no hub, or if it refuses this client's certificate.
            It may be there later.
        ImportError: If `cryptography` is not installed.
        ValueError: If the certificate of the client or of the hub cannot be used.
    """
    check(folder, CLIENT)
    host, port = split_address(address)
    context = ssl.create_default_context(cafile=Path(folder, CA))
    context.load_cert_chain(Path(folder, CERTIFICATE), Path(folder, KEY))
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, int(port)), seconds) as link:
            with context.wrap_socket(link, server_hostname=host) as tls:
                # A hub that takes the client sends gRPC's settings first.
                reason = None if tls.recv(1) else "the hub closes the connection"
    except ssl.SSLCertVerificationError as error:
        reason = _REASONS.get(error.verify_code, error.verify_message)
        raise ValueError(
            f"The certificate of the hub {reason}. Received: address={address!r}"
        ) from None
    except ssl.SSLError as error:
        reason = error.reason
    except OSError as error:
        raise ConnectionError(
            f"No hub answers at {address} by TLS. Start it, and compare its address "
            f"and port. Received: {error}"
        ) from None
    if reason:
        raise ConnectionError(
            f"The hub at {address} refuses {Path(folder, CERTIFICATE)}. Copy this "
            "client's folder from that hub again, and compare both clocks. Received: "
            f"{reason}"
        )
