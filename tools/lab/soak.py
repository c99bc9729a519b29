"""Soaks a served demo model: thousands of mixed requests, of which clients abandon many.

    python tools/lab/soak.py --requests 10000

At the end the server must hold nothing of the requests any more. The server is a child process with
a pool so small that requests preempt each other. A share of the requests are anchors: the same
greedy request must have the same answer from the first to the last. Exit status 1 if a promise is
broken; the broken promises are printed, one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.lab.soak_requests import Ask, asks

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "max-model-len": 256,
    "dtype": "float32",
}
ANSWER_SECONDS = 120.0  # the time for one answer; longer is a hang
START_SECONDS = 300.0
QUIET_SECONDS = 30.0  # the time in which an idle server gives everything back
GROWTH = 1.1  # factor of resident memory between the end of the warm-up and the end
GROWTH_BYTES = 32 << 20  # smaller differences are no growth


@dataclass
class Tally:
    """Counts the results of the requests; only one thread may use it."""

    kinds: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    anchors: dict[str, str] = field(default_factory=dict)  # the text that each anchor must have


@dataclass(frozen=True)
class Probe:
    """Holds numbers of an idle server, seen from outside."""

    resident_bytes: int
    num_files: int
    num_threads: int
    metrics: dict[str, float]  # without labels; the sum for metrics with labels


class Served:
    """Runs the server's process."""

    def __init__(self, flags: Mapping[str, Any], model: str | None = "demo") -> None:
        flags = {**flags, "port": 0}
        command = [sys.executable, "-m", "tools.serve", *([model] if model else []), "--log-json"]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.errors: Counter[str] = Counter()  # messages of the server's log
        self.num_log_bytes = 0
        self._address: str | None = None
        self._is_known = threading.Event()
        self._reading = threading.Thread(target=self._read_log, daemon=True)
        self._reading.start()

    @property
    def address(self) -> str:
        """Returns host:port as soon as the server is ready.

        Raises:
            RuntimeError: The server did not start.
        """
        if not self._is_known.wait(START_SECONDS) or self._address is None:
            raise RuntimeError("the server did not start: " + "; ".join(self.errors))
        return self._address

    def probe(self) -> Probe:
        """Waits until the server is idle, up to a limit, and measures it."""
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            metrics = self._metrics()
            busy = (
                metrics["jaxpage_num_requests_running"] or metrics["jaxpage_num_requests_waiting"]
            )
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        process = psutil.Process(self.process.pid)
        return Probe(process.memory_info().rss, process.num_fds(), process.num_threads(), metrics)

    def end(self) -> int:
        """Asks the server to end, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reading.join(5)

    def _metrics(self) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(fetch(self.address, "/metrics")):
            for sample in family.samples:
                name = (
                    f"{sample.name} {sample.labels['le']}" if "le" in sample.labels else sample.name
                )
                sums[name] += sample.value
        return dict(sums)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.num_log_bytes += len(line)
            try:
                record = json.loads(line)
            except ValueError:  # a line that a library prints
                self.errors[line.strip()[:200]] += 1
                continue
            if record["message"] == "ready":
                self._address = record["address"].removeprefix("http://")
                self._is_known.set()
            elif record["level"] in ("warning", "error", "critical"):
                self.errors[f"{record['level']}: {record['message'][:160]}"] += 1
        self._is_known.set()


@contextmanager
def server(flags: Mapping[str, Any], model: str | None = "demo") -> Iterator[Served]:
    """Runs a server, and kills it if it still runs at the end.

    Args:
        flags: The flags by name, without the dashes.
        model: The model; None if a flag gives the models.
    """
    served = Served(flags, model)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def fetch(address: str, path: str) -> str:
    """Returns the body of a GET request."""
    connection = HTTPConnection(address, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def answer(address: str, ask: Ask) -> tuple[int, str] | None:
    """Returns the status and the body of an answer; None if the client left before.

    Raises:
        OSError: The connection failed.
        HTTPException: The answer is not HTTP.
    """
    connection = HTTPConnection(address, timeout=ANSWER_SECONDS)
    try:
        body = (
            None
            if ask.body is None
            else json.dumps({k: v for k, v in ask.body.items() if v is not None})
        )
        connection.request(
            "GET" if body is None else "POST", ask.path, body, {"Content-Type": "application/json"}
        )
        if ask.leaves_after is None:
            response = connection.getresponse()
            return response.status, response.read().decode()
        return _detach(connection, ask.leaves_after)
    finally:
        connection.close()


def _detach(connection: HTTPConnection, seconds: float) -> tuple[int, str] | None:
    """Returns None, unless the answer was complete before the time was over."""
    deadline = time.monotonic() + seconds
    response = None
    pieces: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        connection.sock.settimeout(left)
        try:
            response = response or connection.getresponse()
            if not (piece := response.read1(65536)):
                return response.status, b"".join(pieces).decode()
            pieces.append(piece)
        except TimeoutError:
            break
    return None


def judge(ask: Ask, status: int, body: str, anchors: dict[str, str]) -> str | None:
    """Returns what is wrong with an answer; None if nothing is."""
    if status not in ask.status:
        return f"{ask.kind}: status {status}: {body[:400]}"
    if status != 200:
        return None if "error" in json.loads(body) else f"{ask.kind}: an error of another shape"
    if ask.body is not None and ask.body.get("stream"):
        if not body.endswith("data: [DONE]\n\n"):
            return f"{ask.kind}: a stream without its end"
        if '"error"' in body:
            return f"{ask.kind}: an error in a stream"
    if ask.kind == "anchor" and ask.body is not None:
        text = json.loads(body)["choices"][0]["text"]
        if anchors.setdefault(ask.body["prompt"], text) != text:
            return "anchor: another text than before"
    return None


def run(
    address: str, expected: Iterator[Ask], num_clients: int, tally: Tally, bar: tqdm[Any]
) -> None:
    """Sends all requests, `num_clients` at a time."""

    def send(ask: Ask) -> tuple[Ask, tuple[int, str] | Exception | None]:
        try:
            return ask, answer(address, ask)
        except (OSError, HTTPException) as error:
            return ask, error

    with ThreadPoolExecutor(num_clients) as pool:
        for future in as_completed([pool.submit(send, ask) for ask in expected]):
            ask, result = future.result()
            tally.kinds[ask.kind] += 1
            if isinstance(result, Exception):
                tally.errors[f"{ask.kind}: {type(result).__name__}: {result}"] += 1
            elif result is None:
                tally.left[ask.kind] += 1
            elif (wrong := judge(ask, *result, tally.anchors)) is not None:
                tally.errors[wrong] += 1
            bar.set_postfix_str(
                f"{sum(tally.left.values())} left, {sum(tally.errors.values())} wrong"
            )
            bar.update()


def step_seconds(before: Probe, after: Probe, share: float) -> float:
    """Returns a bound that this share of the steps between two looks does not exceed.

    It is the bound of a bucket of the server's histogram.
    """
    name = "jaxpage_engine_step_seconds_bucket "
    gained = {
        float(key.removeprefix(name)): value - before.metrics.get(key, 0)
        for key, value in after.metrics.items()
        if key.startswith(name)
    }
    total = max(gained.values())
    return min(bound for bound, count in gained.items() if count >= share * total)


def promises_broken(probes: list[Probe], tally: Tally, served: Served, status: int) -> list[str]:
    """Returns the promises that were not kept.

    Args:
        probes: The server after the warm-up, later, and at the end.
        tally: The results of the requests.
        served: The server.
        status: The server's exit status.
    """
    warm, end = probes[0], probes[-1]
    problems = [f"{count} x {error}" for error, count in tally.errors.items()]
    problems += [f"{count} x in the server's log: {line}" for line, count in served.errors.items()]
    for name in ("num_requests_running", "num_requests_waiting", "num_blocks_pinned"):
        if end.metrics[f"jaxpage_{name}"]:
            problems.append(f"{name} is {end.metrics[f'jaxpage_{name}']:g} at the end")
    for probe in (warm, end):
        if probe.metrics["jaxpage_num_blocks_free"] != probe.metrics["jaxpage_num_blocks_total"]:
            problems.append("blocks are lost")
    if end.metrics["jaxpage_compile_total"] != warm.metrics["jaxpage_compile_total"]:
        problems.append("something was compiled in service")
    if end.resident_bytes > max(GROWTH * warm.resident_bytes, warm.resident_bytes + GROWTH_BYTES):
        problems.append(
            f"memory grew from {warm.resident_bytes >> 20} to {end.resident_bytes >> 20} MiB"
        )
    if end.num_files > warm.num_files + 2 or end.num_threads > warm.num_threads + 2:
        problems.append(
            f"files {warm.num_files} -> {end.num_files}, threads {warm.num_threads} -> {end.num_threads}"
        )
    if not end.metrics["jaxpage_num_preemptions_total"]:
        problems.append("no request was preempted: the pool is too large for this soak")
    if status != 0:
        problems.append(f"the server's exit status is {status}")
    return problems


def report(probes: list[Probe], tally: Tally, seconds: float) -> str:
    """Returns the report for people."""
    warm, end = probes[0], probes[-1]
    steps = [f"{step_seconds(*pair, 0.99):g}" for pair in itertools.pairwise(probes)]

    def both(name: str) -> str:
        return f"{warm.metrics[f'jaxpage_{name}']:g} -> {end.metrics[f'jaxpage_{name}']:g}"

    rows = {
        "requests": f"{sum(tally.kinds.values())} in {seconds:.0f} s, of whose clients {sum(tally.left.values())} left early",
        "by kind": ", ".join(f"{kind} {count}" for kind, count in tally.kinds.most_common()),
        "wrong answers": str(sum(tally.errors.values())),
        "resident memory": f"{warm.resident_bytes >> 20} -> {end.resident_bytes >> 20} MiB",
        "files, threads": f"{warm.num_files} -> {end.num_files}, {warm.num_threads} -> {end.num_threads}",
        "free blocks": f"{both('num_blocks_free')} of {end.metrics['jaxpage_num_blocks_total']:g}",
        "compile_total": both("compile_total"),
        "preemptions": both("num_preemptions_total"),
        "aborted_total": both("aborted_total"),
        "rejected_total": both("rejected_total"),
        "steps": both("engine_steps_total"),
        "p99 step, by quarter": f"at most {', '.join(steps)} s",
    }
    return "\n".join(f"{name:<22}{value}" for name, value in rows.items())


def main() -> int:
    """Runs the soak and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument(
        "--warm-up", type=int, help="requests before the first look; default: a tenth"
    )
    parser.add_argument(
        "--clients", type=int, default=24, help="that ask at the same time; default: %(default)s"
    )
    parser.add_argument(
        "--leaving", type=float, default=0.15, help="share that leaves early; default: %(default)s"
    )
    parser.add_argument(
        "--num-blocks", type=int, default=25, help="of the KV pool; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count, warm_up = arguments.requests, arguments.warm_up or arguments.requests // 10
    ends = [warm_up, *(warm_up + (count - warm_up) * quarter // 4 for quarter in (1, 2, 3, 4))]
    tally, probes = Tally(), []
    everything = list(asks(count, arguments.seed, arguments.leaving))
    flags = {
        **SETTINGS,
        "num-blocks": arguments.num_blocks,
        "max-queued-requests": 4 * arguments.clients,
    }
    with server(flags) as served:
        address, began = served.address, time.monotonic()
        with tqdm(total=count, unit=" requests", disable=None) as bar:
            for start, end in itertools.pairwise([0, *ends]):
                run(address, iter(everything[start:end]), arguments.clients, tally, bar)
                probes.append(served.probe())
        seconds = time.monotonic() - began
        status = served.end()
    print(report(probes, tally, seconds))
    problems = promises_broken(probes, tally, served, status)
    print("\n".join(f"BROKEN: {each}" for each in problems) or "every promise was kept")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
