"""Writes seeded low-entropy text: JSON records, log lines, sums and repeated quotations.

A served model meets such text.
"""

import json
import random


def _choices(text: str) -> list[str]:
    return text.split("|")


NAMES = _choices(
    "Anna|Peter|Clara|Henry|Rose|Martin|Lucy|Oliver|Nora|Simon|Ruth|Felix|Emma|Walter|Grace|Hugo"
)
CITIES = _choices("London|Paris|Rome|Vienna|Madrid|Oslo|Dublin|Prague|Lisbon|Athens")
ITEMS = _choices("apples|books|candles|lamps|chairs|maps|clocks|boxes|letters|coins")
SERVICES = _choices("web|mail|store|search|login|queue|cache|report")
EVENTS = {
    "INFO": (
        "request served",
        "worker started",
        "connection closed",
        "job finished",
        "cache refreshed",
    ),
    "WARNING": ("slow response", "disk is almost full", "retrying the request"),
    "ERROR": ("connection refused", "request timed out", "file not found"),
}
SAYINGS = (
    "The sea is calm to-night and the boats are all at home.",
    "A long road is short when two friends walk it together.",
    "He that rises late must run all day.",
    "There is no fire without some smoke, and no house without some mouse.",
    "The oldest tree in the garden gives the sweetest fruit.",
    "When the river is high, the wise man waits upon the bank.",
    "A candle loses nothing by lighting another candle.",
    "Little by little the bird builds its nest.",
)


def _json_record(rng: random.Random) -> str:
    rows = [
        {
            "id": rng.randint(1, 999),
            "name": rng.choice(NAMES),
            "city": rng.choice(CITIES),
            "age": rng.randint(18, 90),
            "active": rng.random() < 0.7,
            "items": rng.sample(ITEMS, rng.randint(1, 3)),
        }
        for _ in range(rng.randint(2, 4))
    ]
    return "\n".join(json.dumps(row) for row in rows)


def _log_lines(rng: random.Random) -> str:
    second, lines = rng.randint(0, 80000), []
    day = f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    for _ in range(rng.randint(4, 8)):
        second += rng.randint(1, 20)
        level = rng.choices(list(EVENTS), (8, 2, 1))[0]
        clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        service, event = rng.choice(SERVICES), rng.choice(EVENTS[level])
        lines.append(f"{day} {clock} {level} {service}: {event} (id={rng.randint(1, 99)})")
    return "\n".join(lines)


def _sums(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(4, 9)):
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        lines.append(rng.choice((f"{a} + {b} = {a + b}", f"{a + b} - {b} = {a}")))
    return "\n".join(lines)


def _quotation(rng: random.Random) -> str:
    saying, first, second = rng.choice(SAYINGS), *rng.sample(NAMES, 2)
    return (
        f'{first} read aloud: "{saying}"\n\n"Say it again," said {second}.\n\n"{saying}" repeated {first}.\n\n'
        f'And {second} wrote it down: "{saying}"'
    )


def record(rng: random.Random) -> str:
    """Returns one document of a kind chosen at random."""
    return rng.choice((_json_record, _log_lines, _sums, _quotation))(rng)
