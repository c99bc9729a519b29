"""Translates the requests of Ollama's API.

/api/chat and /api/generate become chats or completions, and /api/embed and /api/embeddings become
requests for embeddings; /api/show describes the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxpage.serving.dialects.dialect import (
    ClientHabits,
    Description,
    Dialect,
    GenerationPath,
    ModelList,
    Stay,
    StreamForm,
    TransformPath,
    VectorsPath,
    VersionPath,
)
from jaxpage.serving.dialects.ollama_answers import (
    OllamaAnswer,
    OllamaLoaded,
    OllamaVector,
    OllamaVectors,
    write_unloaded,
)
from jaxpage.serving.dialects.ollama_fields import (
    DOCUMENT,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
    OllamaShowRequest,
    OllamaVectorsRequest,
)
from jaxpage.serving.dialects.ollama_history import (
    content_of,
    messages_of,
    names_of_pictures,
    tools_of,
)
from jaxpage.serving.dialects.ollama_models import (
    about_ollama,
    write_loaded,
    write_tags,
)
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.completions import open_completion
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import EmbeddingAnswer, open_embeddings
from jaxpage.serving.wire.encoding import lines
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.keep_alive import keep_alive_seconds
from jaxpage.serving.wire.reading import is_neutral, read
from jaxpage.serving.wire.templates import may_reason
from jaxpage.serving.wire.tokenizing import Transformed
from jaxpage.settings.argument_checks import show
from jaxpage.settings.field_table import names_in

# The version of Ollama whose API this is. VS Code and Codex refuse a server of an older one.
OLLAMA_VERSION = "0.14.2"
# Ollama's names of options, by their names in chats and completions.
_OPTIONS = names_in("ollama")
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")


def open_ollama_chat(body: dict[str, Any], context: ModelContext) -> OllamaAnswer | OllamaLoaded:
    """Returns the exchange of a request to POST /api/chat.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaChatRequest, context)
    common = _common(request, context)
    if not request.messages:
        return OllamaLoaded(request, ignored)
    requested = {
        "messages": messages_of(request.messages),
        **common,
        **_tools(request, context),
        **_thinking(request, context),
    }
    names: dict[str, str] = {}
    for index, message in enumerate(request.messages):
        names |= names_of_pictures(message.images, index, f"messages[{index}].images")
    return OllamaAnswer(open_chat, requested, context, request, ignored, names)


def _tools(request: OllamaChatRequest, context: ModelContext) -> dict[str, Any]:
    """Returns the field of a chat for `tools`.

    Raises:
        ApiError: The model's calls cannot be read. The message begins as that of Ollama, in which
            clients look for these words.
    """
    if not request.tools:
        return {}
    tools = tools_of(request.tools)
    if context.chat_format.tool_form is None and any(
        tool["type"] in ("function", "custom") for tool in tools
    ):
        reason = context.no_form or "its chat template writes no calls, or --tool-parser is none"
        message = f"{show(request.model)} does not support tools: {reason}"
        raise ApiError(400, message, param="tools")
    return {"tools": tools}


def open_ollama_generate(
    body: dict[str, Any], context: ModelContext
) -> OllamaAnswer | OllamaLoaded:
    """Returns the exchange of a request to POST /api/generate.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaGenerateRequest, context)
    common = _common(request, context)
    if request.raw:
        for name in ("system", "think", "images"):
            if getattr(request, name):
                raise ApiError(400, f"{name} is not supported with raw=true", param=name)
    if not request.prompt and not request.images:
        return OllamaLoaded(request, ignored)
    if request.raw:
        requested = {"max_tokens": context.max_model_len, **common, "prompt": request.prompt}
        return OllamaAnswer(open_completion, requested, context, request, ignored)
    system = [{"role": "system", "content": request.system}] if request.system else []
    content = content_of(request.prompt or "", request.images)
    messages = [*system, {"role": "user", "content": content}]
    requested = {"messages": messages, **common, **_thinking(request, context)}
    names = names_of_pictures(request.images, len(system), "images")
    return OllamaAnswer(open_chat, requested, context, request, ignored, names)


def open_ollama_embed(body: dict[str, Any], context: ModelContext) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request to POST /api/embed.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaEmbedRequest, context)
    return _embedding(
        request,
        ignored,
        context,
        OllamaVectors,
        input=request.input,
        dimensions=request.dimensions,
        truncate=request.truncate is not False,
    )


def open_ollama_embeddings(body: dict[str, Any], context: ModelContext) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request to POST /api/embeddings.

    This is the older path: it has one text, and its vector is not normalised.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaEmbeddingsRequest, context)
    return _embedding(
        request, ignored, context, OllamaVector, input=request.prompt, normalize=False
    )


def _embedding(
    request: OllamaVectorsRequest,
    ignored: tuple[str, ...],
    context: ModelContext,
    kind: type[EmbeddingAnswer],
    **requested: Any,
) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request for embeddings.

    Args:
        request: The request.
        ignored: The paths of ignored fields.
        context: The served model and the server's settings.
        kind: The class that makes the answer.
        requested: Fields of /v1/embeddings.
    """
    _check_options(request.options or OllamaOptions(), context)
    answer = open_embeddings({"model": request.model, **requested}, context, kind)
    answer.ignored_fields = ignored
    return answer


def show_ollama(
    body: dict[str, Any], context: ModelContext, about: Mapping[str, Any] | None = None
) -> Transformed:
    """Returns what clients ask about a model: its length, and what it can do.

    Args:
        body: The request.
        context: The served model and the server's settings.
        about: What `about_ollama` says of the model, if it is known already.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaShowRequest, context)
    about = about_ollama(context) if about is None else about
    # VS Code shows this name in its list of models.
    named = {**about["model_info"], "general.basename": request.model}
    return Transformed({**about, "model_info": named}, ignored)


def _with_served_name(body: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """Returns the request with the name by which the model is served."""
    name = body.get("model")
    if isinstance(name, str) and name not in (*context.model_names, *context.adapters):
        return {**body, "model": DIALECT.habits.plain_name(name)}
    return body


def _common(request: OllamaRequest, context: ModelContext) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    _check_options(options, context)
    requested = {
        ours: value
        for ours, theirs in _OPTIONS.items()
        if (value := getattr(options, theirs)) is not None
        and not (options.repeat_last_n == 0 and theirs in _PENALTIES)
    }
    if options.num_predict is not None and options.num_predict >= 0:
        requested["max_tokens"] = options.num_predict
    if request.format == "json":
        requested["response_format"] = {"type": "json_object"}
    elif request.format is not None:  # {} is a schema as well
        requested["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": request.format},
        }
    return {**requested, "stream": request.stream is not False, "receipt": request.receipt}


def _check_options(options: OllamaOptions, context: ModelContext) -> None:
    for name, value in (options.model_extra or {}).items():
        if name in OllamaOptions.known and not is_neutral(OllamaOptions, name, value):
            raise ApiError(400, f"options.{name} is not supported", param=f"options.{name}")
    if (options.num_ctx or 0) > context.max_model_len:
        message = (
            f"options.num_ctx is {options.num_ctx}, and the server has "
            f"max_model_len={context.max_model_len}"
        )
        raise ApiError(400, message, param="options.num_ctx")


def _thinking(request: OllamaRequest, context: ModelContext) -> dict[str, Any]:
    """Returns the fields of a chat for `think`.

    A model that always thinks does what true asks for, and false is named to the client.

    Raises:
        ApiError: The model does not think. The message begins as that of Ollama.
    """
    if request.think is None:
        return {}
    if isinstance(request.think, str):
        return {"reasoning_effort": request.think}
    if may_reason(context):
        return {"thinking": {"type": "enabled" if request.think else "disabled"}}
    if request.think:
        message = (
            f"{show(request.model)} does not support thinking: its chat template has no variable "
            "for it"
        )
        raise ApiError(400, message, param="think")
    return {}


# A request to these paths that has no such field asks for its model to be loaded or unloaded.
_PROMPTS = {"/api/chat": "messages", "/api/generate": "prompt"}


def _read_stay(path: str, body: dict[str, Any]) -> Stay:
    value = body.get("keep_alive")
    if value is None:
        return Stay()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ApiError(400, f"keep_alive must be a time, got {show(value)}", param="keep_alive")
    try:
        seconds = keep_alive_seconds(value)
    except ValueError as error:
        text = f"keep_alive {error}, got {show(value)}"
        raise ApiError(400, text, param="keep_alive") from None
    prompt = _PROMPTS.get(path)
    if seconds != 0 or prompt is None or body.get(prompt) or body.get("images"):
        return Stay(seconds)
    return Stay(seconds, partial(write_unloaded, is_chat=prompt == "messages"))


def _write_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


DIALECT = Dialect(
    beginnings=("/api/",),
    error=_write_error,
    stream=StreamForm(
        new_frame=lines,
        media_type="application/x-ndjson",
        # White space may precede the JSON of a line, and a line always follows.
        comment=b" ",
        is_default=True,
    ),
    paths={
        "/api/chat": GenerationPath(open_ollama_chat),
        "/api/generate": GenerationPath(open_ollama_generate, "text_completion"),
        "/api/embed": VectorsPath(open_ollama_embed),
        "/api/embeddings": VectorsPath(open_ollama_embeddings),
        "/api/show": TransformPath(show_ollama, Description(about_ollama, show_ollama)),
        "/api/tags": ModelList(is_of_loaded=False, write=write_tags),
        "/api/ps": ModelList(is_of_loaded=True, write=write_loaded),
        "/api/version": VersionPath(OLLAMA_VERSION),
    },
    document=DOCUMENT,
    habits=ClientHabits(
        # Ollama takes JSON under any media type, and its clients and the curl lines of its
        # documentation rely on this.
        takes_any_media_type=True,
        # Clients add a tag to the name, which is "latest" if the user gave none.
        plain_name=lambda name: name.removesuffix(":latest"),
        read_stay=_read_stay,
    ),
)
