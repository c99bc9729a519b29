"""Defines the fields of requests in the APIs that are translated into chats and completions.

These are OpenAI's Responses, Anthropic's Messages and Ollama's API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from jaxpage.serving.wire.request_fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    Count,
    Effort,
    Items,
    JsonObjectFormat,
    Name,
    Prompts,
    RequestObject,
    Stop,
    TextFormat,
    one_of,
)
from jaxpage.settings.argument_checks import INT32_MAX
from jaxpage.settings.sampling_params import MAX_USER_CHARACTERS

ModelName = Annotated[str, Field(min_length=1, max_length=256)]
TopP = Annotated[float, Field(gt=0, le=1)]
Nothing = Annotated[list[Any], Field(max_length=0), one_of("absent or empty: it is not supported")]


class ResponsesPart(RequestObject):
    """A part of a message's content; only text is supported."""

    type: Literal["input_text", "output_text"]
    text: str


class ResponsesMessage(RequestObject):
    """A message of a conversation, in the Responses API."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ResponsesPart]


class ReasoningText(RequestObject):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ResponsesReasoning(RequestObject):
    """The reasoning of an earlier answer; it belongs to the message that follows it."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None


class ResponsesSchemaFormat(RequestObject):
    """Asks for JSON that keeps to a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponsesText(RequestObject):
    """Holds the options of the text of a response."""

    model_config = ConfigDict(extra="forbid")

    format: (
        Annotated[
            TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(RequestObject):
    """Holds the options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Literal[False] | None = None


ResponsesItem = Annotated[
    ResponsesMessage | ResponsesReasoning,
    one_of(
        "a message of text with the role user, assistant, system or developer, or reasoning; others are not supported"
    ),
]


class ResponsesRequest(RequestObject):
    """A request to POST /v1/responses."""

    model: ModelName
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")]
        | Annotated[
            Items[ResponsesItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")
        ],
        # The kind is chosen before the items are read, so that their errors have an index.
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


class TextBlock(RequestObject):
    """A block of text in a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # has no effect: prefixes are cached anyway


class ThinkingBlock(RequestObject):
    """A block with the reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Blocks = Annotated[
    str | Items[TextBlock],
    one_of("a string, or a list of blocks of type 'text'", kinds=("text",)),
]


class UserTurn(RequestObject):
    """A message of the user, in the Messages API."""

    role: Literal["user"]
    content: Blocks


class AssistantTurn(RequestObject):
    """A message of the assistant, in the Messages API."""

    role: Literal["assistant"]
    content: Annotated[
        str | Items[Annotated[TextBlock | ThinkingBlock, Field(discriminator="type")]],
        one_of(
            "a string, or a list of blocks of type 'text' or 'thinking'",
            kinds=("text", "thinking"),
        ),
    ]


class CountTokensRequest(RequestObject):
    """A request to POST /v1/messages/count_tokens."""

    model: ModelName
    messages: Annotated[
        Items[Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    cache_control: dict[str, Any] | None = None  # has no effect: prefixes are cached anyway
    system: Blocks | None = None


class MessagesRequest(CountTokensRequest):
    """A request to POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: TopP | None = None


class OllamaOptions(RequestObject):
    """Holds the options of a request in Ollama's API."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
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
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Penalties look at the whole sequence; 64 is Ollama's own default, 0 means no penalties.
    repeat_last_n: Literal[-1, 0, 64] | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: TopP | None = None


class OllamaRequest(RequestObject):
    """Holds the fields that Ollama's chats and completions share."""

    model: ModelName
    format: (
        Annotated[Literal["", "json"] | dict[str, Any], one_of("'json' or a JSON schema")] | None
    ) = None
    keep_alive: Annotated[str | float, one_of("a time")] | None = None  # the model stays loaded
    options: OllamaOptions | None = None
    stream: bool | None = None  # None streams
    think: Annotated[bool | Effort, one_of("true, false or a level, such as 'low'")] | None = None


class OllamaShowRequest(RequestObject):
    """A request to POST /api/show."""

    model: ModelName
    verbose: bool | None = None  # has no effect: there are no more details


class OllamaMessage(RequestObject):
    """A message of a conversation, in Ollama's API."""

    role: Literal["system", "user", "assistant"]
    content: str
    thinking: str | None = None  # the reasoning of an earlier answer
    images: Nothing | None = None
    tool_calls: Nothing | None = None


class OllamaChatRequest(OllamaRequest):
    """A request to POST /api/chat."""

    # A request without messages asks that the model be loaded.
    messages: Annotated[Items[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A request to POST /api/generate."""

    prompt: str | None = None  # a request without one asks that the model be loaded
    raw: bool | None = None  # if true, the prompt goes to the model without the chat template
    system: str | None = None


class OllamaVectorsRequest(RequestObject):
    """Holds the fields that both of Ollama's paths for embeddings share."""

    model: ModelName
    keep_alive: Annotated[str | float, one_of("a time")] | None = None  # the model stays loaded
    options: OllamaOptions | None = None  # no option changes a vector


class OllamaEmbedRequest(OllamaVectorsRequest):
    """A request to POST /api/embed."""

    input: Prompts
    dimensions: Count | None = None  # only the model's own width is accepted


class OllamaEmbeddingsRequest(OllamaVectorsRequest):
    """A request to POST /api/embeddings, the older of the two paths."""

    prompt: str
