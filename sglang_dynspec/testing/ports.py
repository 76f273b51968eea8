"""Ports for servers and their ranks."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
_PORTS = range(10_000, 30_000)
# ServerArgs: those of DP attention (ZMQ_TCP_PORT_DELTA and on), and from 0.5.11 to 0.5.16 one for
# gRPC (SGLANG_GRPC_PORT).
_DERIVED = (0, *range(233, 241), 10_000)


def free_port() -> int:
    """Return a port on which nothing listens now, nor on those that SGLang derives from it.

    It lies below those that systems hand out to connections: one of these, of the server itself,
    could take it before SGLang does.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        if all(_is_free(port + more) for more in _DERIVED):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True
