"""The fields of requests in the APIs that are translated into chats and completions: Responses, Messages, Ollama's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from jaxpage.serving.wire.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    Count,
    Fields,
    Items,
    JsonObjectFormat,
    Name,
    Prompts,
    Stop,
    TextFormat,
    one_of,
)
from jaxpage.settings.argument_checks import INT32_MAX
from jaxpage.settings.sampling_params import MAX_USER_CHARACTERS

ModelName = Annotated[str, Field(min_length=1, max_length=256)]
TopP = Annotated[float, Field(gt=0, le=1)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class ResponsesPart(Fields):
    type: Literal["input_text", "output_text"]
    text: str


class ResponsesMessage(Fields):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ResponsesPart]


class ReasoningText(Fields):
    type: Literal["reasoning_text"]
    text: str


class ResponsesReasoning(Fields):
    """Of an earlier answer. It goes with the message behind it."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None


class ResponsesSchemaFormat(Fields):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponsesText(Fields):
    model_config = ConfigDict(extra="forbid")

    format: (
        Annotated[
            TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Fields):
    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Literal[False] | None = None


ResponsesItem = Annotated[
    ResponsesMessage | ResponsesReasoning,
    one_of(
        "a message of text with the role user, assistant, system or developer, or reasoning; others are not supported"
    ),
]


class ResponsesRequest(Fields):
    """POST /v1/responses."""

    model: ModelName
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")]
        | Annotated[
            Items[ResponsesItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")
        ],
        # so that errors have an index
        Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: ResponsesText | None = None
    top_p: TopP | None = None
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None


class TextBlock(Fields):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # prefixes are cached without it


class ThinkingBlock(Fields):
    """Of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Blocks = Annotated[
    str | Items[TextBlock],
    one_of("a string, or a list of blocks of type 'text': nothing else is supported"),
]


class UserTurn(Fields):
    role: Literal["user"]
    content: Blocks


class AssistantTurn(Fields):
    role: Literal["assistant"]
    content: Annotated[
        str | Items[Annotated[TextBlock | ThinkingBlock, Field(discriminator="type")]],
        one_of(
            "a string, or a list of blocks of type 'text' or 'thinking': nothing else is supported"
        ),
    ]


class CountTokensRequest(Fields):
    """POST /v1/messages/count_tokens."""

    model: ModelName
    messages: Annotated[
        Items[Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    cache_control: dict[str, Any] | None = None  # prefixes are cached without it
    system: Blocks | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: TopP | None = None


class OllamaOptions(Fields):
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # Where the model is and how it is computed is the server's, and loaded it is: these are taken
    # and not used.
    f16_kv: bool | None = None
    low_vram: bool | None = None
    main_gpu: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None
    num_ctx: Count | None = None  # no more than the server has
    # below 0: as many as there is room for
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: TopP | None = None


class OllamaRequest(Fields):
    """What Ollama's requests have in common."""

    model: ModelName
    format: (
        Annotated[Literal["", "json"] | dict[str, Any], one_of("'json' or a JSON schema")] | None
    ) = None
    keep_alive: Annotated[str | float, one_of("a time")] | None = None  # the model stays loaded
    options: OllamaOptions | None = None
    stream: bool | None = None  # as if true
    think: bool | None = None


class OllamaShowRequest(Fields):
    """POST /api/show."""

    model: ModelName
    verbose: bool | None = None  # there is no more to say


class OllamaMessage(Fields):
    role: Literal["system", "user", "assistant"]
    content: str
    thinking: str | None = None  # of an earlier answer
    images: Nothing | None = None
    tool_calls: Nothing | None = None


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    # none: load the model
    messages: Annotated[Items[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str | None = None  # none: load the model
    raw: bool | None = None  # the prompt as it is, without the chat template
    system: str | None = None


class OllamaVectorsRequest(Fields):
    """What both paths of Ollama's embeddings have."""

    model: ModelName
    keep_alive: Annotated[str | float, one_of("a time")] | None = None  # the model stays loaded
    options: OllamaOptions | None = None  # none of them changes a vector


class OllamaEmbedRequest(OllamaVectorsRequest):
    """POST /api/embed."""

    input: Prompts
    dimensions: Count | None = None  # those of the model


class OllamaEmbeddingsRequest(OllamaVectorsRequest):
    """POST /api/embeddings, the older of the two."""

    prompt: str
