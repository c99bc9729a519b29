"""Lives random lives of `serve --models`: leases, sleep, waking, unloading, clients that leave.

    python tools/fuzz_several.py --minutes 3 --seed 1
    python tools/fuzz_several.py --minutes 3 --server

Without `--server` the table of models has fake models and a clock that jumps, so that thousands of
lives take a minute. The first one that breaks a promise is shrunk and printed as a program. With
it, six clients use a server that has the packaged model twice: an answer that is late, is an error
or has other text ends the run. The exit status is 1 then. Needs the test packages
(`pip install '.[test]'`).
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.table_fuzzing import fuzz
from tools.fuzz_engine import fuzz_parser, print_seed
from tools.lab.soak import server

NUM_CLIENTS = 6
ANSWER_SECONDS = 120.0  # the time for one answer, with a load; longer is a hang
NAMES = ("first", "second")
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 129}
ENGINE = {"memory": "200MiB", "model": "demo", "settings": SETTINGS}
PROMPT = "Once upon a time"
# The paths of acts with the rest of their bodies, each as often as it is to come.
ACTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *[("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})] * 4,
    *[("/v1/embeddings", {"input": PROMPT})] * 4,
    *[("/sleep", {"level": 1})] * 3,
    ("/sleep", {"level": 2}),
    ("/wake_up", {}),
    ("/api/show", {}),
    ("/api/generate", {"keep_alive": 0}),
)
STATUSES = {"/sleep": (200, 409)}
LEAVING = 0.2  # the share of requests whose clients leave early


def main() -> int:
    """Runs the fuzzer and returns the exit status."""
    parser = fuzz_parser(__doc__)
    parser.add_argument(
        "--server", action="store_true", help="use a server with real engines, over HTTP"
    )
    arguments = parser.parse_args()
    seed = print_seed(parser, arguments)
    if arguments.server:
        return fuzz_server(arguments.minutes, seed)
    logging.disable(logging.CRITICAL)  # loads that fail are logged, and are many
    return fuzz(arguments.minutes, seed, report=lambda text: print(text, flush=True))


def fuzz_server(minutes: float, seed: int) -> int:
    """Uses a server of two models for some minutes, and returns 1 if something was wrong."""
    with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-") as directory:
        path = Path(directory) / "models.yaml"
        models = [{"name": name, **ENGINE} for name in NAMES]
        path.write_text(json.dumps({"memory": "400MiB", "models": models}))
        with server({"models": path}, model=None) as served:
            clients = Clients(served.address)
            clients.act(random.Random(seed), minutes)
            status = served.end()
    if status:
        clients.problems.append(f"the server ended with status {status}")
    for problem in clients.problems:
        print(problem)
    print(f"{clients.counts.total()} answers: {dict(clients.counts)} (seed {seed})")
    return 1 if clients.problems else 0


class Clients:
    """Holds what the clients of a server have seen.

    Attributes:
        problems: The answers that were wrong.
        counts: The answers by path and status; status 0 counts those that were left.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._texts: dict[tuple[str, str], Any] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    def act(self, rng: random.Random, minutes: float) -> None:
        """Has all clients act until the time is over or something is wrong."""
        for name in NAMES:
            for path, body in dict(ACTS).items():
                self._ask(name, path, body, None)
        end = time.monotonic() + 60 * minutes
        seeds = [rng.randrange(2**31) for _ in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(lambda seed: self._client(random.Random(seed), end), seeds))

    def _client(self, rng: random.Random, end: float) -> None:
        while time.monotonic() < end and not self.problems:
            path, body = rng.choice(ACTS)
            leaves_after = rng.random() / 5 if rng.random() < LEAVING else None
            self._ask(rng.choice(NAMES), path, body, leaves_after)
            time.sleep(rng.random() / 20)

    def _ask(self, name: str, path: str, body: dict[str, Any], leaves_after: float | None) -> None:
        """Sends a request, and notes what is wrong with its answer."""
        connection = HTTPConnection(self._address, timeout=leaves_after or ANSWER_SECONDS)
        sent = json.dumps({"model": name, **body})
        try:
            connection.request("POST", path, sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
            self._judge(name, path, response.status, text)
        except TimeoutError:
            self.counts[f"{path} 0"] += 1
            if leaves_after is None:
                self.problems.append(f"{path} {sent}: no answer in {ANSWER_SECONDS:g} s")
        except (OSError, HTTPException) as error:
            self.problems.append(f"{path} {sent}: {error!r}")
        finally:
            connection.close()

    def _judge(self, name: str, path: str, status: int, text: str) -> None:
        self.counts[f"{path} {status}"] += 1
        if status not in STATUSES.get(path, (200,)):
            self.problems.append(f"{path} for {name}: {status} {text[:500]}")
        elif path in ("/v1/completions", "/v1/embeddings", "/api/show"):
            answer = json.loads(text)
            part = answer.get("choices") or answer.get("data") or answer
            if self._texts.setdefault((name, path), part) != part:
                self.problems.append(f"{path} for {name}: another answer than before: {text[:500]}")


if __name__ == "__main__":
    sys.exit(main())
