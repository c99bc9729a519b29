"""Makes the server's OpenAPI document from the models that read its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from jaxpage import __version__
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.field_types import RequestObject
from jaxpage.serving.wire.openapi_parts import (
    INTEGER,
    OPTIONAL,
    PLACE,
    PROMPT_USAGE,
    STRING,
    DialectDocument,
    get,
    list_of,
    object_of,
    post,
    reference,
)
from jaxpage.serving.wire.request_fields import (
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)

# The requests of no dialect.
REQUESTS: tuple[type[RequestObject], ...] = (
    *(EmbeddingRequest, ScoreRequest, RerankRequest),
    *(TokenizeRequest, TokenizeChatRequest, DetokenizeRequest),
)


def openapi(context: ModelContext, documents: Iterable[DialectDocument]) -> dict[str, Any]:
    """Returns the document, in OpenAPI 3.1.

    It has the routes of the APIs, but neither the page's routes nor those for administrators. It
    does not say which fields go together; a request with fields that do not also gets a 400.

    Args:
        context: The served model and the server's settings.
        documents: What the document says of each dialect.
    """
    requests = list(REQUESTS)
    paths: dict[str, Any] = {}
    answers = dict(_ANSWERS)
    for dialect in documents:
        requests += dialect.requests
        paths |= dialect.paths
        answers |= dialect.answers
    _, schemas = models_json_schema(
        [(model, "validation") for model in requests], ref_template=PLACE + "{model}"
    )
    definitions = {**schemas["$defs"], **answers}
    for model in requests:
        definitions[model.__name__]["properties"]["model"]["enum"] = [
            *context.model_names,
            *context.adapters,
        ]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxpage",
            "version": __version__,
            "description": "An OpenAI-compatible server of one model.",
        },
        "paths": {**paths, **_others(context)},
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _others(context: ModelContext) -> dict[str, Any]:
    """Returns the routes that generate nothing."""
    return {
        "/v1/embeddings": post("Vectors of texts.", ["EmbeddingRequest"], "Embeddings"),
        "/v1/score": post("Log probabilities of continuations.", ["ScoreRequest"], "Scores"),
        "/v1/rerank": post("Ranks documents by a query.", ["RerankRequest"], "Ranking"),
        "/tokenize": post(
            "The tokens of a text.", ["TokenizeRequest", "TokenizeChatRequest"], "Tokens"
        ),
        "/detokenize": post("The text of tokens.", ["DetokenizeRequest"], "Text"),
        "/v1/models": get("The names of the model.", "Models"),
        "/v1/models/{model}": {
            **get("The model.", "Model", 404),
            "parameters": [_model_parameter(context)],
        },
        "/v1/capabilities": get("What this server honours, field by field.", "Anything"),
        "/version": get("The version of jaxpage.", "Version"),
        "/health": get("Whether the engine is healthy.", "Status", 503),
        "/ready": get("Whether the server accepts requests.", "Status", 503),
        "/metrics": get("Metrics, in Prometheus' text format.", None),
        "/": get("Where what is.", "Anything"),
    }


def _model_parameter(context: ModelContext) -> dict[str, Any]:
    schema = {"type": "string", "enum": [*context.model_names, *context.adapters]}
    return {"name": "model", "in": "path", "required": True, "schema": schema}


_MODEL = object_of(
    id=STRING,
    object={"const": "model"},
    created=INTEGER,
    owned_by=STRING,
    max_model_len=INTEGER,
    capabilities={"type": "object"},
)


_ANSWERS: dict[str, Any] = {
    "Error": object_of(error=object_of(message=STRING, type=STRING, param=OPTIONAL, code=OPTIONAL)),
    "Embeddings": object_of(
        object={"const": "list"},
        model=STRING,
        data=list_of(
            object_of(
                object={"const": "embedding"},
                index=INTEGER,
                embedding={"anyOf": [list_of({"type": "number"}), STRING]},
            )
        ),
        usage=PROMPT_USAGE,
    ),
    "Scores": object_of(
        id=STRING,
        object={"const": "list"},
        created=INTEGER,
        model=STRING,
        data=list_of(
            object_of(
                object={"const": "score"},
                index=INTEGER,
                score={"type": "number"},
                token_ids=list_of(INTEGER),
                token_logprobs=list_of({"type": "number"}),
                is_greedy={"type": "boolean"},
            )
        ),
        usage=PROMPT_USAGE,
    ),
    "Ranking": object_of(
        id=STRING,
        object={"const": "list"},
        model=STRING,
        results=list_of(object_of(index=INTEGER, relevance_score={"type": "number"})),
        usage=PROMPT_USAGE,
    ),
    "Tokens": object_of(count=INTEGER, max_model_len=INTEGER, tokens=list_of(INTEGER)),
    "Text": object_of(prompt=STRING),
    "Models": object_of(object={"const": "list"}, data=list_of(reference("Model"))),
    "Model": _MODEL,
    "Version": object_of(version=STRING),
    "Status": object_of(status=STRING),
    "Anything": {"type": "object"},
}
