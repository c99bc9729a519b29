"""Attacks a server with every field and construct of its requests at its bound.

    python tools/attack.py --minutes 10 --seed 1

Three other clients are there at the same time: one streams, one asks for the health, and one sends
new requests. After each attack the program looks at their longest pauses, the server's memory, its
log, its health and the statuses of its answers. The first promise that is broken ends the run: what
was sent is printed, and the exit status is 1. Needs the test packages (`pip install '.[test]'`).

The server promises that on a machine with free cores no stream and no health check pauses for more
than a second, which `--pause-seconds 1` demands. The usual bound is looser, for busy machines.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.attack_bodies import Attack, attacks
from tools.lab.soak import Served, fetch, server

SETTINGS = {
    "max-num-seqs": 64,
    "max-num-batched-tokens": 256,
    "dtype": "float32",
    "log-level": "info",
}
# A longer pause of another client is a finding: no client may stop all others. A new request waits
# until others are answered, so its time is told and is no finding.
PAUSE_SECONDS = 5.0
# On a busy machine a stream pauses anyway, so the bound is at least this many times its longest
# pause before the first attack.
IDLE_PAUSES = 20
# The bound of the growth of resident memory, from before the first attack to some seconds after
# one.
GROWTH_BYTES = 256 << 20
SETTLE_SECONDS = 5.0
LOG_BYTES = 1 << 20  # for one attack
ANSWER_SECONDS = 15.0  # the time after which an attacker leaves
BASELINE_SECONDS = 4.0
NUM_WARM_UPS = 64  # plain requests at once, after which the memory is that of a server in use
STATUSES = frozenset((200, 400, 404, 408, 413, 415, 429, 431, 503, 504))
SHOWN_BYTES = 2000  # for a body that is printed
READER_SECONDS = 4.0  # the time in which a reader that pauses does not read
CLIENTS = {"stream": "a stream", "health": "/health", "request": "a new request"}


class Witness:
    """Runs a client that streams without end, one that asks for the health, and one that is new.

    It keeps the pauses of the first two, and how long the new requests wait for their answers.

    Attributes:
        problems: What the clients saw that must not be.
        attack: The name of the attack that is being made.
        maximum: The longest pause of each client in seconds, with the name of the attack.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._pauses: deque[tuple[str, float, float]] = deque(maxlen=100_000)
        self._open: dict[str, float] = {}  # when the pause began that is not over
        self._is_over = False
        self.problems: list[str] = []
        self.attack = ""
        self.maximum = {name: (0.0, "") for name in CLIENTS}
        for follow in (self._stream, self._ask_health, self._ask_anew):
            threading.Thread(target=follow, daemon=True).start()

    def find_max_pause(self, begin: float, end: float) -> float:
        """Returns the longest pause of the stream and the health in seconds.

        Only the part between the two times counts. It is noted for each client.
        """
        pauses = [*self._pauses, *((name, start, end) for name, start in [*self._open.items()])]
        max_seconds = dict.fromkeys(CLIENTS, 0.0)
        for name, start, stop in pauses:
            max_seconds[name] = max(max_seconds[name], min(stop, end) - max(start, begin))
        for name, seconds in max_seconds.items():
            self.maximum[name] = max(self.maximum[name], (seconds, self.attack))
        return max(max_seconds["stream"], max_seconds["health"])

    def end(self) -> None:
        """Stops both clients."""
        self._is_over = True

    def _stream(self) -> None:
        body = {
            "model": "demo",
            "prompt": "The old house",
            "max_tokens": 480,
            "ignore_eos": True,
            "stream": True,
        }
        while not self._is_over:
            connection = HTTPConnection(self._address, timeout=120)
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json"},
                )
                response = connection.getresponse()
                if response.status != 200:
                    time.sleep(0.05)  # the attack has filled the queue
                while response.readline().startswith(b"data: {"):
                    response.readline()
                    self._saw("stream")
            except (OSError, HTTPException) as error:
                self.problems.append(
                    f"the other client's stream broke: {type(error).__name__}: {error}"
                )
                time.sleep(0.2)
            finally:
                self._open.pop("stream", None)  # the next request may have to wait for its turn
                connection.close()

    def _ask_health(self) -> None:
        while not self._is_over:
            self._open["health"] = time.monotonic()
            try:
                if "ok" not in (answer := fetch(self._address, "/health")):
                    self.problems.append(f"/health: {answer[:200]}")
            except (OSError, HTTPException) as error:
                self.problems.append(f"/health: {type(error).__name__}: {error}")
            self._saw("health")
            self._open.pop("health")
            time.sleep(0.1)

    def _ask_anew(self) -> None:
        body = json.dumps({"model": "demo", "prompt": "The old house", "max_tokens": 1})
        while not self._is_over:
            self._open["request"] = time.monotonic()
            connection = HTTPConnection(self._address, timeout=120)
            try:
                connection.request(
                    "POST", "/v1/completions", body, {"Content-Type": "application/json"}
                )
                connection.getresponse().read()
            except (OSError, HTTPException) as error:
                self.problems.append(f"a new request: {type(error).__name__}: {error}")
            finally:
                connection.close()
            self._saw("request")
            self._open.pop("request")
            time.sleep(0.2)

    def _saw(self, name: str) -> None:
        now = time.monotonic()
        if name in self._open:
            self._pauses.append((name, self._open[name], now))
        self._open[name] = now


def send(attack: Attack, body: bytes | None) -> Iterator[bytes]:
    """Yields the parts of a request; an empty part is a short pause."""
    method = "GET" if body is None else "POST"
    head = f"{method} {attack.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body is None:
        yield f"{head}\r\n".encode()
        return
    head += f"Content-Type: {attack.content_type}\r\n"
    if attack.sending in ("chunked", "crumbs"):
        yield f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
        size = 1000 if attack.sending == "chunked" else 1
        for first in range(0, len(body), 1000):
            thousand = body[first : first + 1000]
            parts = (thousand[start : start + size] for start in range(0, 1000, size))
            yield b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
        yield b"0\r\n\r\n"
        return
    yield f"{head}Content-Length: {len(body)}\r\n\r\n".encode()
    if attack.sending == "cut":
        yield body[: len(body) // 2]
        return
    if attack.sending in ("bytes", "drip"):
        size = 1 if attack.sending == "bytes" else max(1, len(body) // 20)
        for start in range(0, 20 * size, size):
            yield body[start : start + size]
            yield b""
        body = body[20 * size :]
    yield body


def strike(address: str, attack: Attack, body: bytes | None) -> str:
    """Sends one request; returns the status of the answer, or how the connection ended."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + ANSWER_SECONDS
    if attack.sending == "paused":
        deadline += READER_SECONDS
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as client:
            for part in send(attack, body):
                client.sendall(part)
                if not part:
                    time.sleep(0.05)
            if attack.sending == "cut":
                return "cut"
            if attack.sending == "unread":
                time.sleep(0.5)
                return "unread"
            if attack.sending == "paused":
                time.sleep(READER_SECONDS)
            answer = b""
            while (left := deadline - time.monotonic()) > 0:
                client.settimeout(left)
                if not (part := client.recv(1 << 16)):
                    break
                answer = answer or part[:12]
            return answer[9:12].decode("latin-1") or "closed"
    except TimeoutError:
        return "left"
    except OSError as error:  # the server refuses the request while it is still being sent
        return type(error).__name__


class Siege:
    """Attacks a server and checks what must hold."""

    def __init__(self, served: Served, pause_seconds: float | None = None) -> None:
        """Warms the server up, and starts the other clients.

        Args:
            served: The server.
            pause_seconds: The longest pause; None for the usual bound of this machine.
        """
        self._served = served
        self.address = served.address
        self._process = psutil.Process(served.process.pid)
        self.tally: Counter[str] = Counter()
        self.max_pause = self.max_growth = (0.0, "")  # with the attack's name
        warm_up = Attack("warm-up", "/v1/completions", None)
        body = json.dumps(
            {"model": "demo", "prompt": ["Once upon a time"] * 4, "max_tokens": 16}
        ).encode()
        with ThreadPoolExecutor(NUM_WARM_UPS) as pool:
            list(pool.map(lambda _: strike(self.address, warm_up, body), range(NUM_WARM_UPS)))
        self._witness = Witness(self.address)
        begin = time.monotonic()
        time.sleep(BASELINE_SECONDS)
        self.idle_pause = self._witness.find_max_pause(begin, time.monotonic())
        self.bound = pause_seconds or max(PAUSE_SECONDS, IDLE_PAUSES * self.idle_pause)
        self.idle_pauses = {name: seconds for name, (seconds, _) in self._witness.maximum.items()}
        self._witness.maximum = {name: (0.0, "") for name in CLIENTS}
        self._resident_bytes = self._memory()

    def withstands(self, attack: Attack) -> list[str]:
        """Makes the attack; returns the promises that it broke."""
        body = attack.make() if attack.make else None
        num_log_bytes, begin = self._served.num_log_bytes, time.monotonic()
        self._witness.attack = attack.name
        with ThreadPoolExecutor(attack.num_connections) as pool:
            ends = list(
                pool.map(
                    lambda _: strike(self.address, attack, body), range(attack.num_connections)
                )
            )
        self.tally.update(ends)
        growth = self._settled()
        pause = self._witness.find_max_pause(begin, time.monotonic())
        self.max_pause = max(self.max_pause, (pause, attack.name))
        self.max_growth = max(self.max_growth, (growth, attack.name))
        problems = [
            f"an answer has the status {end}"
            for end in set(ends)
            if end.isdigit() and int(end) not in STATUSES
        ]
        problems += self._witness.problems
        if pause > self.bound:
            problems.append(f"another client waited {pause:.1f} s; the bound is {self.bound:.1f} s")
        if growth > GROWTH_BYTES:
            problems.append(
                f"{SETTLE_SECONDS:g} s later the server has {growth / 2**20:.0f} MiB more than at the start"
            )
        if (logged := self._served.num_log_bytes - num_log_bytes) > LOG_BYTES:
            problems.append(f"the server logged {logged} bytes")
        if self._served.process.poll() is not None:
            problems.append(f"the server ended with status {self._served.process.returncode}")
        return problems

    def end(self) -> None:
        """Stops the other clients."""
        self._witness.end()

    def pauses(self) -> Iterator[str]:
        """Yields a line for each of the other clients, with its longest pause."""
        for name, (seconds, attack) in self._witness.maximum.items():
            idle = self.idle_pauses[name]
            yield f"longest pause of {CLIENTS[name]}: {seconds:.2f} s (idle {idle:.2f} s): {attack}"

    def _settled(self) -> int:
        """Returns the growth of memory in bytes; waits up to five seconds while it is large."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (
            growth := self._memory() - self._resident_bytes
        ) > GROWTH_BYTES and time.monotonic() < deadline:
            time.sleep(0.2)
        return growth

    def _memory(self) -> int:
        """Returns the resident bytes of the server and its child processes.

        A page that several of them share counts once, where the system says how many share it.
        """
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                memory = process.memory_full_info()
            except psutil.NoSuchProcess:  # a child that has ended
                continue
            total += getattr(memory, "pss", 0) or memory.rss
        return total


def run(siege: Siege, expected: Iterator[Attack], minutes: float, *, goes_on: bool) -> int:
    """Makes attacks until the time is over; returns how many broke a promise."""
    deadline, num_broken, count = time.monotonic() + 60 * minutes, 0, 0
    for count, attack in enumerate(expected, 1):  # noqa: B007
        if problem := siege.withstands(attack):
            num_broken += 1
            body = attack.make() if attack.make else b""
            print(f"BROKEN by {attack.name}\n  " + "\n  ".join(problem))
            print(
                f"  {attack.num_connections} x {len(body)} bytes: {body[:SHOWN_BYTES].decode(errors='replace')!r}"
            )
            if not goes_on:
                break
        if time.monotonic() > deadline:
            break
    ends = ", ".join(f"{end} {number}" for end, number in siege.tally.most_common())
    print(f"{count} attacks: {ends}")
    growth, largest = siege.max_growth
    print(*siege.pauses(), sep="\n")
    print(f"bound of a stream and /health {siege.bound:.1f} s")
    print(f"most memory after an attack {growth / 2**20:+.0f} MiB: {largest}", flush=True)
    return num_broken


def main() -> int:
    """Runs the attacks and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=1.0, metavar="N", help="time for new attacks; default: 1"
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="of the attacks' order; default: a new one"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="only attacks with one of these texts in their names, once each",
    )
    parser.add_argument(
        "--all", action="store_true", help="go on after an attack that broke a promise"
    )
    parser.add_argument(
        "--pause-seconds",
        type=float,
        metavar="N",
        help=f"the longest pause of a stream and of /health; default: {PAUSE_SECONDS:g}, or more on a busy machine",
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        server({**SETTINGS, "batch-directory": directory}) as served,
    ):
        document: dict[str, Any] = json.loads(fetch(served.address, "/openapi.json"))
        expected = attacks(document, seed)
        if arguments.only is not None:
            chosen = [
                each for each in expected if any(text in each.name for text in arguments.only)
            ]
            if not chosen:
                parser.error(f"no attack's name has one of {arguments.only}")
            expected = iter(chosen)
        siege = Siege(served, arguments.pause_seconds)
        num_broken = run(siege, expected, arguments.minutes, goes_on=arguments.all)
        siege.end()
        status = served.end()
    for line, count in served.errors.items():
        print(f"{count} x in the server's log: {line}")
    if status:
        print(f"BROKEN: the server's exit status is {status}")
    return 1 if num_broken or status else 0


if __name__ == "__main__":
    sys.exit(main())
