"""Makes the requests of a soak, right and wrong, of every kind; some of the clients leave early."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WORDS = (
    "Alice",
    "rabbit",
    "the queen",
    "of hearts",
    "said",
    "and",
    "a little",
    "door",
    "ran",
    "tea",
    "again",
    "why",
)


@dataclass(frozen=True)
class Ask:
    """One request of the soak."""

    kind: str
    path: str
    body: dict[str, Any] | None  # None for GET
    status: tuple[int, ...] = (200,)  # the statuses that an answer may have
    # Seconds after which the client leaves without the whole answer
    leaves_after: float | None = None


def asks(count: int, seed: int, leaving: float) -> Iterator[Ask]:
    """Yields the requests of a soak, the same for the same seed.

    Args:
        count: The number of requests.
        seed: The seed.
        leaving: The share of the requests whose client leaves early.
    """
    rng = random.Random(seed)
    for _ in range(count):
        make = rng.choices([make for make, _ in MIX], [weight for _, weight in MIX])[0]
        ask = make(rng)
        if ask.body is not None and ask.status == (200,) and rng.random() < leaving:
            ask = Ask(
                ask.kind, ask.path, ask.body, ask.status, rng.choice((0.0, 0.01, 0.05, 0.2, 0.5))
            )
        yield ask


def _prompt(rng: random.Random) -> str:
    shared = (
        "Alice was beginning to get very tired of sitting by her sister on the bank. "
        * rng.randint(0, 1)
    )
    return shared + " ".join(rng.choices(WORDS, k=rng.randint(1, 24)))


def _completion(kind: str, rng: random.Random, **fields: Any) -> Ask:
    body = {
        "model": "demo",
        "prompt": _prompt(rng),
        "max_tokens": rng.randint(1, 48),
        **fields,
    }
    return Ask(kind, "/v1/completions", body)


def _anchor(rng: random.Random) -> Ask:
    prompt = rng.choice(("The rabbit ran", "Off with her head", "Once upon a time there"))
    return _completion("anchor", rng, prompt=prompt, max_tokens=12, temperature=0)


def _sample(rng: random.Random) -> Ask:
    return _completion(
        "sampled", rng, seed=rng.randrange(2**32), stop=["\n"], presence_penalty=0.5, top_k=20
    )


def _stream(rng: random.Random) -> Ask:
    return _completion("streamed", rng, stream=True, stream_options={"include_usage": True})


def _samples(rng: random.Random) -> Ask:
    return _completion("n samples", rng, n=rng.randint(2, 3), logprobs=2, max_tokens=16)


def _best(rng: random.Random) -> Ask:
    return _completion("best_of", rng, n=1, best_of=3, max_tokens=16)


def _beams(rng: random.Random) -> Ask:
    return _completion("beams", rng, n=rng.randint(2, 3), use_beam_search=True, max_tokens=16)


def _tokens(rng: random.Random) -> Ask:
    prompts = [
        [rng.randrange(1, 2048) for _ in range(rng.randint(1, 40))]
        for _ in range(rng.randint(1, 3))
    ]
    return _completion("token ids", rng, prompt=prompts, cache_salt=rng.choice(("a", "b", None)))


def _score(rng: random.Random) -> Ask:
    return _completion("prompt logprobs", rng, echo=True, logprobs=2)


def _structure(rng: random.Random) -> Ask:
    number = rng.randrange(1000)
    expected = rng.choice(
        (
            {"regex": f"[a-z]{{3,8}} {number}"},
            {"choice": ["yes", "no", f"maybe {number}"]},
            {"json": {"type": "object", "properties": {f"field_{number}": {"type": "integer"}}}},
        )
    )
    return _completion("structured", rng, structured_outputs=expected, stream=rng.random() < 0.5)


def _chat(rng: random.Random) -> Ask:
    messages = [{"role": "user", "content": _prompt(rng)} for _ in range(rng.randint(1, 2))]
    body = {
        "model": "demo",
        "messages": messages,
        "max_tokens": rng.randint(1, 24),
        "logprobs": True,
    }
    return Ask("chat", "/v1/chat/completions", {**body, "stream": rng.random() < 0.5})


def _wrong(rng: random.Random) -> Ask:
    fields: dict[str, Any] = rng.choice(
        (
            {"temperature": -1},
            {"n": 10**9},
            {"prompt": "Alice " * 1000},
            {"logit_bias": {"2048": 1}},
            {"structured_outputs": {"regex": "("}},
            {"stop": ""},
            {"prompt": {}},
            {"suffix": "x"},
        )
    )
    return Ask(
        "refused",
        "/v1/completions",
        {**(_completion("", rng).body or {}), **fields},
        status=(400,),
    )


def _other(rng: random.Random) -> Ask:
    paths = (
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/models/none",
        f"/{rng.random()}",
        "/tokenize",
    )
    path = rng.choice(paths)
    if path == "/tokenize":
        return Ask("other", path, {"prompt": _prompt(rng)})
    return Ask("other", path, None, (200,) if path in paths[:3] else (404,))


MIX: tuple[tuple[Callable[[random.Random], Ask], int], ...] = (
    *(
        (_anchor, 10),
        (_sample, 20),
        (_stream, 20),
        (_chat, 12),
        (_samples, 8),
        (_best, 3),
        (_beams, 5),
    ),
    *((_tokens, 6), (_score, 3), (_structure, 5), (_wrong, 5), (_other, 3)),
)
