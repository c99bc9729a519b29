"""Measures `jaxpage run-batch` on a file of the same requests, for `jaxpage bench throughput`.

Such a file has the answers of the server, so each request is read, checked and answered as JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxpage.bench.measure import median
from jaxpage.bench.results import Measurement
from jaxpage.bench.workloads import WorkItem
from jaxpage.settings.engine_config import EngineConfig

# Answers a file of requests for a model of this name, into another file, with an engine of its own;
# returns the seconds without those of making the engine.
AnswerBatch = Callable[[EngineConfig, Path, Path, str], float]

NAME = "run-batch"


def run_batched(
    answer_batch: AnswerBatch, config: EngineConfig, workload: Sequence[WorkItem], *, repeats: int
) -> Measurement:
    """Answers a file of all requests; returns the median of the repeats.

    Each repeat makes an engine, as the command does, and has no warm-up.

    Args:
        answer_batch: Runs the file.
        config: The settings of the engine.
        workload: The requests.
        repeats: The number of runs.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpage-bench-") as directory:
        source = Path(directory, "in.jsonl")
        source.write_text("".join(_line(n, item) for n, item in enumerate(workload)))
        runs = []
        for repeat in range(repeats):
            target = Path(directory, f"out-{repeat}.jsonl")
            start = time.perf_counter()
            duration = answer_batch(config, source, target, NAME)
            runs.append(
                Measurement.of(
                    NAME,
                    workload,
                    _outputs(target, len(workload)),
                    duration=duration,
                    load_seconds=time.perf_counter() - start - duration,
                )
            )
    return median(runs)


def _line(number: int, item: WorkItem) -> str:
    body = {
        "model": NAME,
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line) + "\n"


def _outputs(target: Path, count: int) -> list[list[int]]:
    """Returns the token ids of each answer, in the order of the requests."""
    outputs: list[list[int]] = [[] for _ in range(count)]
    for line in target.read_text().splitlines():
        answer: dict[str, Any] = json.loads(line)
        body = answer["response"]["body"]
        if "choices" not in body:
            raise RuntimeError(f"{NAME} was refused request {answer['custom_id']}: {body}")
        outputs[int(answer["custom_id"])] = body["choices"][0]["token_ids"]
    return outputs
