"""Exits with 0 if the server of a process answers at /health, on whatever port it listens.

    python healthcheck.py [PID]

PID is 1 by default, the first process of a container. The port may come from a flag, a variable or a
configuration file, so the listening sockets of the process and of its children are asked.
"""

from __future__ import annotations

import http.client
import sys

import psutil

TIMEOUT_SECONDS = 2.0


def listening_ports(pid: int) -> list[int]:
    """Returns the TCP ports on which a process or one of its children listens."""
    process = psutil.Process(pid)
    connections = [
        connection
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("tcp")
    ]
    return sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})


def is_healthy(port: int) -> bool:
    """Returns whether a port of this machine answers GET /health with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # such as the port of KV events
        return False
    finally:
        connection.close()


def main() -> int:
    """Returns the exit status."""
    pid = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    return int(not any(is_healthy(port) for port in listening_ports(pid)))


if __name__ == "__main__":
    sys.exit(main())
