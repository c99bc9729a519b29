"""tools/attack.py attacks every field of every request, and says what a broken promise is."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.wire.openapi import openapi
from tests.support.attack_bodies import SENDINGS, Attack, attacks, kinds_of
from tests.support.wire import context
from tools.attack import GROWTH_BYTES, LOG_BYTES, Siege, send

DOCUMENT = openapi(context(), [dialect.document for dialect in DIALECTS])


def test_every_field_of_every_request_is_attacked():
    names = [attack.name for kind in kinds_of(DOCUMENT) for attack in kind]
    for path, methods in DOCUMENT["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for each in schema.get("anyOf", [schema]):
                for field in DOCUMENT["components"]["schemas"][each["$ref"].rpartition("/")[2]][
                    "properties"
                ]:
                    assert any(name.startswith(f"{path} {field}: ") for name in names), (
                        path,
                        field,
                    )
    assert "/v1/completions structured_outputs: construct json, properties x n 64" in names


def test_attacks_are_the_same_for_the_same_seed():
    first, again, other = (
        [attack.name for attack in itertools.islice(attacks(DOCUMENT, seed), 50)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    for attack in itertools.islice(attacks(DOCUMENT, 3), 60):
        assert attack.make is None or attack.make()


@pytest.mark.parametrize("sending", SENDINGS)
def test_a_body_is_sent_whole_or_cut(sending):
    body = json.dumps({"a": "b" * 3000}).encode()
    head, _, content = b"".join(send(Attack("", "/x", None, sending=sending), body)).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"POST /x HTTP/1.1\r\n")
    if sending in ("chunked", "crumbs"):
        content = b"".join(content.split(b"\r\n")[1::2])
    assert content == (body[: len(body) // 2] if sending == "cut" else body)


KEPT: dict[str, Any] = {
    "status": "200",
    "pause": 0.1,
    "growth": 0,
    "logged": 10,
    "returncode": None,
}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"status": "500"}, "status 500"),
        ({"pause": 6.0}, "waited 6.0 s"),
        ({"growth": GROWTH_BYTES + 1}, "256 MiB more"),
        ({"logged": LOG_BYTES + 1}, "logged"),
        ({"returncode": -9}, "ended with status -9"),
        ({}, None),
    ],
)
def test_broken_promises_are_reported(broken, message, monkeypatch):
    seen = SimpleNamespace(**{**KEPT, **broken})
    siege = object.__new__(Siege)
    process = SimpleNamespace(poll=lambda: seen.returncode, returncode=seen.returncode)
    served = SimpleNamespace(num_log_bytes=0, process=process)

    def strike(*_: Any) -> str:
        served.num_log_bytes += seen.logged
        return str(seen.status)

    monkeypatch.setattr("tools.attack.strike", strike)
    witness = SimpleNamespace(find_max_pause=lambda *_: seen.pause, problems=[])
    siege.__dict__.update(_served=served, _witness=witness, address="", bound=5.0)
    siege.__dict__.update(tally=Counter(), max_pause=(0.0, ""), max_growth=(0.0, ""))
    monkeypatch.setattr(siege, "_settled", lambda: seen.growth)
    problem = siege.withstands(Attack("", "/", lambda: b"{}"))
    assert (message is None and not problem) or (len(problem) == 1 and message in problem[0])  # type: ignore[operator]
