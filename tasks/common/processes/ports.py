"""TCP ports for servers."""

import errno
import random
import socket

# Below the range from which systems assign ports to outgoing connections: an outgoing connection
# could otherwise take the port before the server listens on it.
PORTS = range(20_000, 32_000)
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # host names of this machine


def free_port(address: str = "127.0.0.1") -> int:
    """Return a random TCP port in PORTS on which nothing listens at this address. Raise OSError if
    this machine does not have the address."""
    while True:
        port = random.SystemRandom().choice(PORTS)  # another process draws other ports
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
