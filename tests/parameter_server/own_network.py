"""Runs a command in a new network namespace, after activating its loopback."""

import fcntl
import socket
import struct
import subprocess
import sys

SIOCSIFFLAGS, IFF_UP_AND_RUNNING = 0x8914, 0x41

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", IFF_UP_AND_RUNNING)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)
    sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
