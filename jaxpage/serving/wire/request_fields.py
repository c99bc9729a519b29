"""Defines the fields of requests, each with its type and its bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from jaxpage.settings.argument_checks import INT32_MAX
from jaxpage.settings.sampling_params import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_LOGPROBS,
    MAX_USER_CHARACTERS,
)
from jaxpage.shapes import MAX_BIASES

MAX_N = 128  # sequences of one prompt: n, best_of, the width of a beam search
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_COMPLETION_LOGPROBS = 5
MAX_MESSAGES = 4096
MAX_TOOLS = 128

Item = TypeVar("Item")
# Validation stops at the first error: a body has room for a million wrong items.
Items = Annotated[list[Item], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]


def one_of(expected: str, kinds: tuple[str, ...] = ()) -> WrapValidator:
    """Makes a union report one message instead of one for each of its members.

    Args:
        expected: The words that follow "must be" in the message.
        kinds: Where a list of parts is wanted, their types; the message names another type.
    """

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {expected}{_describe_refused(value, kinds)}") from None

    return WrapValidator(validate)


def _describe_refused(value: Any, kinds: tuple[str, ...]) -> str:
    """Returns the end of a message that says which type of part is not supported."""
    parts = value if kinds and isinstance(value, list) else ()
    types = (part.get("type") for part in parts if isinstance(part, dict))
    return next(
        (f", not {kind[:40]!r}" for kind in types if isinstance(kind, str) and kind not in kinds),
        "",
    )


class RequestObject(BaseModel):
    """A JSON object of a request, read strictly: the text "1" is not a number.

    Unknown fields are kept, so that they can be reported.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(RequestObject):
    """Holds the options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    # Every chunk has a usage then, whether or not `include_usage` is true.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(RequestObject):
    """Asks for text without a grammar."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class JsonObjectFormat(RequestObject):
    """Asks for a JSON object of any shape."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class JsonSchema(RequestObject):
    """Holds a JSON schema and its name."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # has no effect: the schema is always kept to


class JsonSchemaFormat(RequestObject):
    """Asks for JSON that keeps to a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class GenerationRequest(RequestObject):
    """Holds the fields that completions and chats share; a null field counts as left out."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,10}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[Items[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: (
        Annotated[
            Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)],
            one_of(
                f"a string of 1 to {MAX_STOP_CHARACTERS} characters, or a list of at most {MAX_STOPS} of them"
            ),
        ]
        | None
    ) = None
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)] | None = (
        None
    )
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[bool | Literal["never"], one_of("true, false or 'never'")] | None = (
        None
    )


Prompts = Annotated[
    str | Items[str] | Items[TokenId] | Items[Items[TokenId]],
    one_of("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]


class CompletionRequest(GenerationRequest):
    """A request to POST /v1/completions."""

    prompt: Prompts
    # 0 needs echo: the answer is the prompt alone.
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None


class TextPart(RequestObject):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Items[TextPart],
    one_of("a string, or a list of parts of type 'text'", kinds=("text",)),
]


class SystemMessage(RequestObject):
    """A message that instructs the model."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestObject):
    """A message of the user."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(RequestObject):
    """Holds the name and the arguments of a call."""

    name: Name
    arguments: str  # a JSON object


class ToolCall(RequestObject):
    """A call of a tool, in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class RefusalPart(RequestObject):
    """A part of an assistant's message that says why there is no answer."""

    type: Literal["refusal"]
    refusal: str


AssistantContent = Annotated[
    str | Items[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    one_of("a string, or a list of parts of type 'text' or 'refusal'", kinds=("text", "refusal")),
]


class AssistantMessage(RequestObject):
    """A message of the assistant."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, by the name that vLLM and its router use
    tool_calls: Items[ToolCall] | None = None
    name: str | None = None


class ToolMessage(RequestObject):
    """A message with the result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(RequestObject):
    """Describes a function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any] | bool, one_of("a JSON schema")] | None = None
    strict: bool | None = None


class Tool(RequestObject):
    """A tool that the model may call; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestObject):
    """Names a function."""

    model_config = ConfigDict(extra="forbid")

    name: Name


class NamedTool(RequestObject):
    """Names the one tool that the model must call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestObject):
    """Holds the tools that the model may call, or of which it must call one."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestObject):
    """Restricts the choice to some of the tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ConversationFields(RequestObject):
    """Holds the fields from which a chat template renders a prompt."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Both become variables of the chat template, where it has them; see efforts.py.
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    """A request to POST /v1/chat/completions."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice,
            one_of(
                "'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}}, or "
                "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}"
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None  # has no effect: no completion is kept


class EmbeddingRequest(RequestObject):
    """A request to POST /v1/embeddings."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None  # only the model's own width is accepted
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None


class ScoreRequest(RequestObject):
    """A request to POST /v1/score; a single prompt goes with all continuations."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt: Prompts
    continuation: Prompts
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)] | None = (
        None
    )
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None


class RerankDocument(RequestObject):
    """A document of a request to POST /v1/rerank."""

    text: str


class RerankRequest(RequestObject):
    """A request to POST /v1/rerank."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        Items[str] | Items[RerankDocument],
        one_of("a list of strings, or a list of objects with a text"),
    ]
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None


class TokenizeRequest(RequestObject):
    """A request to POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ConversationFields):
    """A request to POST /tokenize with a conversation."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(RequestObject):
    """A request to POST /detokenize."""

    model: str | None = None
    tokens: Items[TokenId]
