"""Defines the requests of Ollama's API, and describes its routes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallId,
    Count,
    Effort,
    Items,
    ModelName,
    Name,
    RequestObject,
    by_name,
    one_of,
    with_parameters,
)
from jaxpage.serving.wire.openapi_parts import (
    INTEGER,
    LINES,
    STRING,
    DialectDocument,
    get,
    list_of,
    object_of,
    post,
)
from jaxpage.serving.wire.request_fields import Prompts
from jaxpage.settings.argument_checks import INT32_MAX
from jaxpage.settings.field_table import Field as Line

Pictures = Annotated[Items[str], one_of("a list of pictures in base64")]


class OllamaOptions(with_parameters("ollama", RequestObject)):  # type: ignore[misc]
    """Holds the options of a request in Ollama's API."""

    known = by_name(
        Line("logits_all", neutral=(False,)),
        Line("embedding_only", neutral=(False,)),
        Line("mirostat", neutral=(0,)),
        # Ollama's own defaults, which matter only with mirostat.
        Line("mirostat_eta", neutral=(0.1,)),
        Line("mirostat_tau", neutral=(5,)),
        Line("penalize_newline", neutral=(True,)),
        Line("tfs_z", neutral=(1,)),
        Line("typical_p", neutral=(1,)),
        Line("vocab_only", neutral=(False,)),
    )
    # The options from here to `use_mmap` have no effect: the server has decided where and how the
    # model runs, and has loaded it.
    f16_kv: bool | None = None
    low_vram: bool | None = None
    main_gpu: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_keep: int | None = None  # tokens that stay when a context is shifted; none ever is
    num_thread: int | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None
    num_ctx: Count | None = None  # at most the server's max_model_len
    # A number below 0 asks for as many tokens as there is room for.
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    # Penalties look at the whole sequence; 64 is Ollama's own default, 0 means no penalties.
    repeat_last_n: Literal[-1, 0, 64] | None = None


_COMMON = by_name(
    Line("format", neutral=("",)),
    Line("images", neutral=([],)),
    Line("logprobs", neutral=(False,)),
    Line("options", neutral=({},)),
    Line("shift", neutral=(False,)),
    Line("tools", neutral=([],)),
    Line("top_logprobs", neutral=(0,)),
    # An input that is too long is refused, whatever this says.
    Line("truncate", neutral=(False, True)),
)


class OllamaRequest(RequestObject):
    """Holds the fields that Ollama's chats and completions share."""

    known = _COMMON

    model: ModelName
    format: (
        Annotated[Literal["", "json"] | dict[str, Any], one_of("'json' or a JSON schema")] | None
    ) = None
    keep_alive: Annotated[str | float, one_of("a time")] | None = None  # the model stays loaded
    options: OllamaOptions | None = None
    receipt: bool | None = None
    stream: bool | None = None  # None streams
    think: Annotated[bool | Effort, one_of("true, false or a level, such as 'low'")] | None = None


class OllamaShowRequest(RequestObject):
    """A request to POST /api/show."""

    known = by_name(
        Line("options", neutral=({},)),
        Line("system", neutral=("",)),
        Line("template", neutral=("",)),
    )

    model: ModelName
    verbose: bool | None = None  # has no effect: there are no more details


class OllamaCalledFunction(RequestObject):
    """Holds the name and the arguments of a call, in Ollama's API."""

    added = frozenset({"index", "description"})

    name: Name
    # Some clients send the text of the object.
    arguments: Annotated[dict[str, Any] | str, one_of("an object")] | None = None


class OllamaCall(RequestObject):
    """A call of a function, in a message of the assistant, in Ollama's API."""

    added = frozenset({"index", "type"})

    id: Literal[""] | CallId | None = None
    function: OllamaCalledFunction


class OllamaMessage(RequestObject):
    """A message of a conversation, in Ollama's API."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None  # Ollama's clients leave out an empty one
    thinking: str | None = None  # the reasoning of an earlier answer
    images: Pictures | None = None
    tool_calls: Items[OllamaCall] | None = None
    # Which call a result is of; without either it is that of the first call without a result.
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    """A request to POST /api/chat."""

    # A request without messages asks that the model be loaded.
    messages: Annotated[Items[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    # They are read as those of a chat, which has the same paths.
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A request to POST /api/generate."""

    known = _COMMON | by_name(
        Line("context", neutral=([],)),
        Line("height"),
        Line("raw", neutral=(False,)),
        Line("steps"),
        Line("suffix", neutral=("",)),
        Line("system", neutral=("",)),
        Line("template", neutral=("",)),
        Line("width"),
    )

    # A request without both asks that the model be loaded.
    prompt: str | None = None
    images: Pictures | None = None
    raw: bool | None = None  # if true, the prompt goes to the model without the chat template
    system: str | None = None


class OllamaVectorsRequest(RequestObject):
    """Holds the fields that both of Ollama's paths for embeddings share."""

    model: ModelName
    keep_alive: Annotated[str | float, one_of("a time")] | None = None  # the model stays loaded
    options: OllamaOptions | None = None  # no option changes a vector


class OllamaEmbedRequest(OllamaVectorsRequest):
    """A request to POST /api/embed."""

    known = by_name(Line("truncate", neutral=(True,)))

    input: Prompts
    truncate: bool | None = None  # None cuts an input that is too long
    dimensions: Count | None = None  # only the model's own width is accepted


class OllamaEmbeddingsRequest(OllamaVectorsRequest):
    """A request to POST /api/embeddings, the older of the two paths."""

    prompt: str


_DETAILS = object_of(
    format=STRING,
    family=STRING,
    families=list_of(STRING),
    parameter_size=STRING,
    quantization_level=STRING,
)
_FILES = {
    "name": STRING,
    "model": STRING,
    "size": INTEGER,
    "digest": STRING,
    "details": _DETAILS,
}
_LINE = {
    "model": STRING,
    "created_at": STRING,
    "done": {"type": "boolean"},
    "done_reason": STRING,
}
DOCUMENT = DialectDocument(
    (
        OllamaChatRequest,
        OllamaGenerateRequest,
        OllamaShowRequest,
        OllamaEmbedRequest,
        OllamaEmbeddingsRequest,
    ),
    {
        "/api/chat": post(
            "Answers a conversation: Ollama's.",
            ["OllamaChatRequest"],
            "OllamaChat",
            streams=LINES,
            error="OllamaError",
        ),
        "/api/generate": post(
            "Answers a prompt: Ollama's.",
            ["OllamaGenerateRequest"],
            "OllamaGenerate",
            streams=LINES,
            error="OllamaError",
        ),
        "/api/tags": get("The names of the model: Ollama's.", "OllamaModels", error="OllamaError"),
        "/api/ps": get(
            "The names of the model, which is loaded: Ollama's.",
            "OllamaLoaded",
            error="OllamaError",
        ),
        "/api/show": post(
            "About the model: Ollama's.",
            ["OllamaShowRequest"],
            "OllamaModel",
            error="OllamaError",
        ),
        "/api/embed": post(
            "Vectors: Ollama's.", ["OllamaEmbedRequest"], "OllamaVectors", error="OllamaError"
        ),
        "/api/embeddings": post(
            "The vector of a text: Ollama's.",
            ["OllamaEmbeddingsRequest"],
            "OllamaVector",
            error="OllamaError",
        ),
        "/api/version": get("The version of the API.", "Version", error="OllamaError"),
    },
    {
        "OllamaError": object_of(error=STRING),
        "OllamaChat": object_of(
            message=object_of(content=STRING, role={"const": "assistant"}), **_LINE
        ),
        "OllamaGenerate": object_of(response=STRING, **_LINE),
        "OllamaVectors": object_of(
            model=STRING, embeddings=list_of(list_of({"type": "number"})), prompt_eval_count=INTEGER
        ),
        "OllamaVector": object_of(embedding=list_of({"type": "number"})),
        "OllamaModels": object_of(models=list_of(object_of(**_FILES, modified_at=STRING))),
        "OllamaLoaded": object_of(models=list_of(object_of(**_FILES, context_length=INTEGER))),
        "OllamaModel": object_of(
            details=_DETAILS, model_info={"type": "object"}, capabilities=list_of(STRING)
        ),
    },
)
