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
    chance = random.Random(seed)
    for _ in range(count):
        make = chance.choices([make for make, _ in MIX], [weight for _, weight in MIX])[0]
        ask = make(chance)
        if ask.body is not None and ask.status == (200,) and chance.random() < leaving:
            ask = Ask(
                ask.kind, ask.path, ask.body, ask.status, chance.choice((0.0, 0.01, 0.05, 0.2, 0.5))
            )
        yield ask


def _prompt(chance: random.Random) -> str:
    shared = (
        "Alice was beginning to get very tired of sitting by her sister on the bank. "
        * chance.randint(0, 1)
    )
    return shared + " ".join(chance.choices(WORDS, k=chance.randint(1, 24)))


def _completion(kind: str, chance: random.Random, **fields: Any) -> Ask:
    body = {
        "model": "demo",
        "prompt": _prompt(chance),
        "max_tokens": chance.randint(1, 48),
        **fields,
    }
    return Ask(kind, "/v1/completions", body)


def _anchor(chance: random.Random) -> Ask:
    prompt = chance.choice(("The rabbit ran", "Off with her head", "Once upon a time there"))
    return _completion("anchor", chance, prompt=prompt, max_tokens=12, temperature=0)


def _sample(chance: random.Random) -> Ask:
    return _completion(
        "sampled", chance, seed=chance.randrange(2**32), stop=["\n"], presence_penalty=0.5, top_k=20
    )


def _stream(chance: random.Random) -> Ask:
    return _completion("streamed", chance, stream=True, stream_options={"include_usage": True})


def _samples(chance: random.Random) -> Ask:
    return _completion("n samples", chance, n=chance.randint(2, 3), logprobs=2, max_tokens=16)


def _best(chance: random.Random) -> Ask:
    return _completion("best_of", chance, n=1, best_of=3, max_tokens=16)


def _beams(chance: random.Random) -> Ask:
    return _completion("beams", chance, n=chance.randint(2, 3), use_beam_search=True, max_tokens=16)


def _tokens(chance: random.Random) -> Ask:
    prompts = [
        [chance.randrange(1, 2048) for _ in range(chance.randint(1, 40))]
        for _ in range(chance.randint(1, 3))
    ]
    return _completion(
        "token ids", chance, prompt=prompts, cache_salt=chance.choice(("a", "b", None))
    )


def _score(chance: random.Random) -> Ask:
    return _completion("prompt logprobs", chance, echo=True, logprobs=2)


def _structure(chance: random.Random) -> Ask:
    number = chance.randrange(1000)
    expected = chance.choice(
        (
            {"regex": f"[a-z]{{3,8}} {number}"},
            {"choice": ["yes", "no", f"maybe {number}"]},
            {"json": {"type": "object", "properties": {f"field_{number}": {"type": "integer"}}}},
        )
    )
    return _completion(
        "structured", chance, structured_outputs=expected, stream=chance.random() < 0.5
    )


def _chat(chance: random.Random) -> Ask:
    messages = [{"role": "user", "content": _prompt(chance)} for _ in range(chance.randint(1, 2))]
    body = {
        "model": "demo",
        "messages": messages,
        "max_tokens": chance.randint(1, 24),
        "logprobs": True,
    }
    return Ask("chat", "/v1/chat/completions", {**body, "stream": chance.random() < 0.5})


def _wrong(chance: random.Random) -> Ask:
    fields: dict[str, Any] = chance.choice(
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
        {**(_completion("", chance).body or {}), **fields},
        status=(400,),
    )


def _other(chance: random.Random) -> Ask:
    paths = (
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/models/none",
        f"/{chance.random()}",
        "/tokenize",
    )
    path = chance.choice(paths)
    if path == "/tokenize":
        return Ask("other", path, {"prompt": _prompt(chance)})
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
