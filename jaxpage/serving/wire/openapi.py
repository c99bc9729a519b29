"""Makes the server's OpenAPI document from the models that read its requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxpage import __version__
from jaxpage.serving.dialects.messages_fields import CountTokensRequest, MessagesRequest
from jaxpage.serving.dialects.ollama_fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from jaxpage.serving.dialects.responses_fields import ResponsesRequest
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.request_fields import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)

_REQUESTS: tuple[type[BaseModel], ...] = (
    *(CompletionRequest, ChatCompletionRequest, EmbeddingRequest, ScoreRequest),
    RerankRequest,
    *(TokenizeRequest, TokenizeChatRequest, DetokenizeRequest),
    *(ResponsesRequest, MessagesRequest, CountTokensRequest),
    *(OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest),
    *(OllamaEmbedRequest, OllamaEmbeddingsRequest),
)
_PLACE = "#/components/schemas/"
_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"


def openapi(context: ModelContext) -> dict[str, Any]:
    """Returns the document, in OpenAPI 3.1.

    It has the routes of the APIs, but neither the page's routes nor those for administrators. It
    does not say which fields go together; a request with fields that do not also gets a 400.
    """
    _, schemas = models_json_schema(
        [(model, "validation") for model in _REQUESTS], ref_template=_PLACE + "{model}"
    )
    definitions = {**schemas["$defs"], **_ANSWERS}
    for model in _REQUESTS:
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
        "paths": {**_conversations(), **_ollama(), **_others(context)},
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _conversations() -> dict[str, Any]:
    """Returns the routes that generate, in the formats of OpenAI and Anthropic."""
    return {
        "/v1/completions": _post(
            "Completes prompts.", ["CompletionRequest"], "Completion", streams=_EVENTS
        ),
        "/v1/chat/completions": _post(
            "Answers a conversation.",
            ["ChatCompletionRequest"],
            "ChatCompletion",
            streams=_EVENTS,
        ),
        "/v1/responses": _post(
            "Answers a conversation: OpenAI's Responses.",
            ["ResponsesRequest"],
            "Response",
            streams=_EVENTS,
        ),
        "/v1/messages": _post(
            "Answers a conversation: Anthropic's Messages.",
            ["MessagesRequest"],
            "Message",
            streams=_EVENTS,
            error="MessagesError",
        ),
        "/v1/messages/count_tokens": _post(
            "The tokens of a message's prompt.",
            ["CountTokensRequest"],
            "TokenCount",
            error="MessagesError",
        ),
    }


def _ollama() -> dict[str, Any]:
    """Returns the routes of Ollama's API."""
    return {
        "/api/chat": _post(
            "Answers a conversation: Ollama's.",
            ["OllamaChatRequest"],
            "OllamaChat",
            streams=_LINES,
            error="OllamaError",
        ),
        "/api/generate": _post(
            "Answers a prompt: Ollama's.",
            ["OllamaGenerateRequest"],
            "OllamaGenerate",
            streams=_LINES,
            error="OllamaError",
        ),
        "/api/tags": _get("The names of the model: Ollama's.", "OllamaModels", error="OllamaError"),
        "/api/ps": _get(
            "The names of the model, which is loaded: Ollama's.",
            "OllamaLoaded",
            error="OllamaError",
        ),
        "/api/show": _post(
            "About the model: Ollama's.",
            ["OllamaShowRequest"],
            "OllamaModel",
            error="OllamaError",
        ),
        "/api/embed": _post(
            "Vectors: Ollama's.", ["OllamaEmbedRequest"], "OllamaVectors", error="OllamaError"
        ),
        "/api/embeddings": _post(
            "The vector of a text: Ollama's.",
            ["OllamaEmbeddingsRequest"],
            "OllamaVector",
            error="OllamaError",
        ),
        "/api/version": _get("The version of jaxpage.", "Version", error="OllamaError"),
    }


def _others(context: ModelContext) -> dict[str, Any]:
    """Returns the routes that generate nothing."""
    return {
        "/v1/embeddings": _post("Vectors of texts.", ["EmbeddingRequest"], "Embeddings"),
        "/v1/score": _post("Log probabilities of continuations.", ["ScoreRequest"], "Scores"),
        "/v1/rerank": _post("Ranks documents by a query.", ["RerankRequest"], "Ranking"),
        "/tokenize": _post(
            "The tokens of a text.", ["TokenizeRequest", "TokenizeChatRequest"], "Tokens"
        ),
        "/detokenize": _post("The text of tokens.", ["DetokenizeRequest"], "Text"),
        "/v1/models": _get("The names of the model.", "Models"),
        "/v1/models/{model}": {
            **_get("The model.", "Model", 404),
            "parameters": [_model_parameter(context)],
        },
        "/v1/capabilities": _get("What this server honours, field by field.", "Anything"),
        "/version": _get("The version of jaxpage.", "Version"),
        "/health": _get("Whether the engine is healthy.", "Status", 503),
        "/ready": _get("Whether the server accepts requests.", "Status", 503),
        "/metrics": _get("Metrics, in Prometheus' text format.", None),
        "/": _get("Where what is.", "Anything"),
    }


def _post(
    summary: str,
    requests: list[str],
    answer: str,
    *,
    streams: str | None = None,
    error: str = "Error",
) -> dict[str, Any]:
    """Returns a route for POST.

    Args:
        summary: The summary of the route.
        requests: The names of the schemas of a request.
        answer: The name of the schema of the answer.
        streams: The media type of a stream; None if the route does not stream.
        error: The name of the schema of an error.
    """
    schemas = [_reference(name) for name in requests]
    content = _json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    responses = _responses(
        _json(_reference(answer)), 400, 404, 408, 413, 415, 429, 503, 504, error=error
    )
    if streams is not None:
        # It has no type: in OpenAPI 3.1 that would describe the whole stream, but readers of events
        # would take it for each event.
        events = {"description": "What comes of the answer, part by part, as JSON"}
        responses["200"]["content"][streams] = {"schema": events}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": responses,
        }
    }


def _get(summary: str, answer: str | None, *errors: int, error: str = "Error") -> dict[str, Any]:
    content = (
        {"text/plain": {"schema": {"type": "string"}}}
        if answer is None
        else _json(_reference(answer))
    )
    return {"get": {"summary": summary, "responses": _responses(content, *errors, error=error)}}


def _responses(content: dict[str, Any], *errors: int, error: str) -> dict[str, Any]:
    """Returns the responses of a route.

    Each has 401, for a server that wants a key; none has 500, which should never happen.
    """
    refused = {
        str(status): {"description": "An error", "content": _json(_reference(error))}
        for status in (401, *errors)
    }
    return {"200": {"description": "The answer", "content": content}, **refused}


def _model_parameter(context: ModelContext) -> dict[str, Any]:
    schema = {"type": "string", "enum": [*context.model_names, *context.adapters]}
    return {"name": "model", "in": "path", "required": True, "schema": schema}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": _PLACE + name}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_OPTIONAL = {"type": ["string", "null"]}
_USAGE = _object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
_PROMPT_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)
_MODEL = _object(
    id=_STRING,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_STRING,
    max_model_len=_INTEGER,
)


def _completion(kind: str, **choice: Any) -> dict[str, Any]:
    reason = {"enum": ["stop", "length", "tool_calls"]}
    choices = _list(
        _object(
            index=_INTEGER, finish_reason=reason, logprobs={"type": ["object", "null"]}, **choice
        )
    )
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_INTEGER,
        model=_STRING,
        choices=choices,
        usage=_USAGE,
    )


_DETAILS = _object(
    format=_STRING,
    family=_STRING,
    families=_list(_STRING),
    parameter_size=_STRING,
    quantization_level=_STRING,
)
_OLLAMA_FILES = {
    "name": _STRING,
    "model": _STRING,
    "size": _INTEGER,
    "digest": _STRING,
    "details": _DETAILS,
}
_TURN = {"role": {"const": "assistant"}}
_OLLAMA = {
    "model": _STRING,
    "created_at": _STRING,
    "done": {"type": "boolean"},
    "done_reason": _STRING,
}
_ANSWERS: dict[str, Any] = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=_OPTIONAL, code=_OPTIONAL)),
    "MessagesError": _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING)),
    "OllamaError": _object(error=_STRING),
    "Response": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        status={"enum": ["completed", "incomplete"]},
        model=_STRING,
        output=_list(
            _object(
                id=_STRING,
                type={"enum": ["message", "reasoning"]},
                content=_list({"type": "object"}),
            )
        ),
        usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER),
    ),
    "Message": _object(
        id=_STRING,
        type={"const": "message"},
        model=_STRING,
        content=_list(_object(type={"enum": ["text", "thinking"]})),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence"]},
        stop_sequence=_OPTIONAL,
        usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER),
        **_TURN,
    ),
    "OllamaChat": _object(message=_object(content=_STRING, **_TURN), **_OLLAMA),
    "OllamaGenerate": _object(response=_STRING, **_OLLAMA),
    "OllamaVectors": _object(
        model=_STRING, embeddings=_list(_list({"type": "number"})), prompt_eval_count=_INTEGER
    ),
    "OllamaVector": _object(embedding=_list({"type": "number"})),
    "OllamaModels": _object(models=_list(_object(**_OLLAMA_FILES, modified_at=_STRING))),
    "OllamaLoaded": _object(models=_list(_object(**_OLLAMA_FILES, context_length=_INTEGER))),
    "OllamaModel": _object(
        details=_DETAILS, model_info={"type": "object"}, capabilities=_list(_STRING)
    ),
    "TokenCount": _object(input_tokens=_INTEGER),
    "Completion": _completion("text_completion", text=_STRING),
    "ChatCompletion": _completion(
        "chat.completion", message=_object(role={"const": "assistant"}, content=_OPTIONAL)
    ),
    "Embeddings": _object(
        object={"const": "list"},
        model=_STRING,
        data=_list(
            _object(
                object={"const": "embedding"},
                index=_INTEGER,
                embedding={"anyOf": [_list({"type": "number"}), _STRING]},
            )
        ),
        usage=_PROMPT_USAGE,
    ),
    "Scores": _object(
        id=_STRING,
        object={"const": "list"},
        created=_INTEGER,
        model=_STRING,
        data=_list(
            _object(
                object={"const": "score"},
                index=_INTEGER,
                score={"type": "number"},
                token_ids=_list(_INTEGER),
                token_logprobs=_list({"type": "number"}),
                is_greedy={"type": "boolean"},
            )
        ),
        usage=_PROMPT_USAGE,
    ),
    "Ranking": _object(
        id=_STRING,
        object={"const": "list"},
        model=_STRING,
        results=_list(_object(index=_INTEGER, relevance_score={"type": "number"})),
        usage=_PROMPT_USAGE,
    ),
    "Tokens": _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_list(_INTEGER)),
    "Text": _object(prompt=_STRING),
    "Models": _object(object={"const": "list"}, data=_list(_reference("Model"))),
    "Model": _MODEL,
    "Version": _object(version=_STRING),
    "Status": _object(status=_STRING),
    "Anything": {"type": "object"},
}
