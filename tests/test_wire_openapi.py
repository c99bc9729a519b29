"""The OpenAPI document: it says of requests what the models do, and of answers what comes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from jaxpage.serving.dialects.messages import count_tokens, open_message
from jaxpage.serving.dialects.ollama import open_ollama_chat, open_ollama_generate, show_ollama
from jaxpage.serving.dialects.registry import DIALECTS, dialect_of
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import detokenize, open_chat, open_completion, tokenize
from jaxpage.serving.wire.openapi import openapi
from tests.support.field_bounds import fields_beyond
from tests.support.wire import Scripted, context, output
from tests.test_wire_requests import (
    ACCEPTED,
    CHAT_REFUSED,
    COMMON_REFUSED,
    COMPLETION_REFUSED,
    USER,
    chat,
    completion,
)

DOCUMENT = openapi(context(), [dialect.document for dialect in DIALECTS])


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )


def test_it_is_json_whose_schemas_are_schemas_and_whose_references_lead_somewhere():
    text = json.dumps(DOCUMENT, allow_nan=False)
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= DOCUMENT["components"]["schemas"].keys()


def test_routes_say_with_which_statuses_they_refuse():
    """All that have a body do so alike; 401 is that of a server with a key."""
    statuses = {"200", "400", "401", "404", "408", "413", "415", "429", "503", "504"}
    bodies = {path: item["post"] for path, item in DOCUMENT["paths"].items() if "post" in item}
    assert "/v1/chat/completions" in bodies and "/v1/messages" in bodies
    for path, route in bodies.items():
        assert route["responses"].keys() == statuses, path


@pytest.mark.parametrize(
    "fields", [fields for fields, _ in ACCEPTED], ids=lambda value: f"{value!r:.50}"
)
def test_what_is_accepted_is_what_it_says(fields):
    validator("CompletionRequest").validate(completion(**fields))
    validator("ChatCompletionRequest").validate(chat(**fields))


@pytest.mark.parametrize(
    ("kind", "name", "opens", "new", "refused"),
    [
        ("completions", "CompletionRequest", open_completion, completion, COMPLETION_REFUSED),
        ("chats", "ChatCompletionRequest", open_chat, chat, CHAT_REFUSED),
    ],
)
def test_whatever_it_forbids_is_refused(kind, name, opens, new, refused):
    """It forbids most of what is refused.

    One field says something of another in the other cases.
    """
    table = [fields for fields, *_ in COMMON_REFUSED + refused]
    table += [{name: value} for name, value, _ in fields_beyond(kind)[::3]]
    valid = validator(name)
    forbidden = [fields for fields in table if not valid.is_valid(new(**fields))]
    assert len(forbidden) > len(table) / 2
    for fields in forbidden:
        with pytest.raises(ApiError):
            opens(new(**fields), context())


def test_the_answers_are_what_it_says():
    for opens, body, name in (
        (open_completion, completion(), "Completion"),
        (open_chat, chat(), "ChatCompletion"),
        (open_response, {"model": "demo", "input": "Hello"}, "Response"),
        (open_message, {"model": "demo", "messages": [USER], "max_tokens": 5}, "Message"),
        (open_ollama_chat, {"model": "demo", "messages": [USER]}, "OllamaChat"),
        (open_ollama_generate, {"model": "demo", "prompt": "Hello"}, "OllamaGenerate"),
    ):
        exchange = opens(body, context())
        validator(name).validate(exchange.whole([output(exchange, [Scripted(["x"])])]))
    validator("Tokens").validate(tokenize({"prompt": "x"}, context()).body)
    validator("Text").validate(detokenize({"tokens": [5]}, context()).body)
    validator("TokenCount").validate(
        count_tokens({"model": "demo", "messages": [USER]}, context()).body
    )
    validator("OllamaModel").validate(show_ollama({"model": "demo"}, context()).body)
    for path, name in (
        ("/v1/chat/completions", "Error"),
        ("/v1/messages", "MessagesError"),
        ("/api/chat", "OllamaError"),
    ):
        validator(name).validate(dialect_of(path).error(ApiError(404, "x")))
    assert not validator("Error").is_valid({"error": "x"})
