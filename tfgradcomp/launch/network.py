"""Network of the workers of one machine.

TensorFlow's servers listen on all interfaces without a password. In a network
namespace with loopback alone, the workers and other machines cannot reach each other.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

NETWORKS = ("private", "host")

_LOOPBACK = "lo"
_NEW_USERS, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # SIOCGIFFLAGS, SIOCSIFFLAGS
_IS_UP = 1  # IFF_UP


def enter_private_network() -> None:
    """Moves this process, and all that it starts, to a network with loopback alone.

    Where the user is not root, the namespace is made in a user namespace that keeps the
    user's id. This process must have a single thread.

    Raises:
        OSError: If the kernel does not allow this user to make the namespace.
    """
    if _unshare(_NEW_NETWORK):
        user, group = os.geteuid(), os.getegid()
        error = _unshare(_NEW_USERS | _NEW_NETWORK)
        if error:
            raise OSError(error, os.strerror(error))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _flags(_SET_FLAGS, _LOOPBACK, _IS_UP)


def reachable_interfaces() -> list[str]:
    """Returns the names of the interfaces through which others may connect."""
    names = [name for _, name in socket.if_nameindex() if name != _LOOPBACK]
    return [name for name in names if _flags(_GET_FLAGS, name) & _IS_UP]


def _flags(request: int, name: str, flags: int = 0) -> int:
    """Sets or gets the flags of an interface."""
    form = "16sH22x"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        given = struct.pack(form, name.encode(), flags)
        return struct.unpack(form, fcntl.ioctl(any_socket, request, given))[1]


def _unshare(flags: int) -> int:
    """Returns 0, or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.unshare(flags) else 0
