"""Summarises the answers to many requests, under the names of vLLM's benchmark results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jaxpage.bench.serving.http_client import TimedAnswer
from jaxpage.errors import UsageError

HELD = 0.95  # if a smaller share of the drawn rate was sent, the report says so
JITTER = 0.01  # seconds that any client may be late
GOALS = ("ttft", "tpot", "e2el")  # what an SLO can bound
_PERCENTILES = (50, 90, 99)


def summary(
    answers: Sequence[TimedAnswer], duration: float, goals: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns counts, throughput and latencies of the answers.

    TTFT, TPOT and ITL are vLLM's: the time to the first output, the rest divided by the other
    tokens, and the time between outputs. The normalised latency is that of the PagedAttention
    paper: the whole time divided by the output tokens. A latency without a sample is None, such as
    the TPOT of requests with one token.

    Args:
        answers: The answers, with errors among them.
        duration: The seconds of the whole run.
        goals: The most milliseconds by name (`GOALS`). The goodput counts the requests that keep
            all.
    """
    done = [answer for answer in answers if answer.error is None]
    num_input = sum(answer.num_prompt_tokens for answer in done)
    num_output = sum(answer.num_output_tokens for answer in done)
    seconds = {
        "ttft": [_of(answer)["ttft"] for answer in done],
        "tpot": [_of(answer)["tpot"] for answer in done if answer.num_output_tokens > 1],
        "itl": [after - before for answer in done for before, after in pairwise(answer.outputs)],
        "e2el": [_of(answer)["e2el"] for answer in done],
        "normalized_latency": [_of(answer)["e2el"] / answer.num_output_tokens for answer in done],
    }
    measured = [
        answer
        for answer in done
        if all(1000 * _of(answer)[name] <= maximum for name, maximum in (goals or {}).items())
    ]
    return {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "errors": sorted({answer.error for answer in answers if answer.error is not None})[:5],
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        **({"request_goodput": len(measured) / duration} if goals else {}),
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        **{key: value for name, values in seconds.items() for key, value in _spread(name, values)},
    }


def _of(answer: TimedAnswer) -> dict[str, float]:
    first = answer.outputs[0]
    last = answer.outputs[-1]
    return {
        "ttft": first - answer.due,
        # An answer of one token has no other tokens; with 0 it keeps any goal.
        "tpot": (last - first) / max(1, answer.num_output_tokens - 1),
        "e2el": last - answer.due,
    }


def _spread(name: str, seconds: Sequence[float]) -> list[tuple[str, float | None]]:
    """Returns the mean and percentiles in milliseconds, or None for each if there is no time."""
    if not seconds:
        return [(f"{label}_{name}_ms", None) for label in ("mean", "median", "p90", "p99")]
    values = np.array(seconds) * 1000
    median, p90, p99 = np.percentile(values, _PERCENTILES).tolist()
    spread = {"mean": float(values.mean()), "median": median, "p90": p90, "p99": p99}
    return [(f"{label}_{name}_ms", value) for label, value in spread.items()]


def rate_held(answers: Sequence[TimedAnswer], start: float) -> dict[str, Any]:
    """Returns the rate that was drawn, the rate at which requests were sent, and a verdict.

    The mapping is empty if all requests were due at once.
    """
    due, sent = (
        max(times) - start
        for times in zip(*((answer.due, answer.sent) for answer in answers), strict=True)
    )
    if due <= 0:
        return {}
    return {
        "drawn_request_rate": len(answers) / due,
        "sent_request_rate": len(answers) / sent,
        "max_lateness_ms": 1000 * max(answer.sent - answer.due for answer in answers),
        "request_rate_held": due / sent >= HELD or sent - due < JITTER,
    }


def goals_of(words: Sequence[str]) -> dict[str, float]:
    """Returns the goals in words such as `ttft:200 tpot:50`, which `--goodput` takes.

    Raises:
        UsageError: A word is no goal.
    """
    goals: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = 0.0
        # `not >` refuses NaN, too.
        if name not in GOALS or not milliseconds > 0:
            raise UsageError(
                f"--goodput takes NAME:MILLISECONDS with {', '.join(GOALS)}, got {word!r}"
            )
        goals[name] = milliseconds
    return goals
