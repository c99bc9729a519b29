"""Defines the requests of OpenAI's API and of vLLM's, each with its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from jaxpage.engine.texts import (
    Side,
    Truncation,
    truncation_of,
)
from jaxpage.outputs import Pooling
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallId,
    Count,
    Effort,
    Items,
    ModelName,
    Name,
    Number,
    RequestObject,
    TokenId,
    by_name,
    one_of,
    with_parameters,
)
from jaxpage.serving.wire.fields import OF_CHATS, OF_GENERATION, OF_RANKINGS, OF_TRUNCATION, REFUSED
from jaxpage.serving.wire.tool_fields import (
    AllowedToolsChoice,
    AnyTool,
    NamedTool,
    TextFormat,
    ToolCall,
)
from jaxpage.settings import field_table as table
from jaxpage.settings.argument_checks import INT32_MAX


class StreamOptions(RequestObject):
    """Holds the options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    # Every chunk has a usage then, whether or not `include_usage` is true.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


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
    """Holds the fields that completions and chats share; a null field counts as left out.

    The parameters of the engine come from the table; see `with_parameters`.
    """

    known = by_name(*table.PARAMETERS, *OF_GENERATION, *OF_CHATS, *REFUSED)

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    receipt: bool | None = None
    use_beam_search: bool | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns a parameter."""

    @property
    def format_parameter(self) -> str:
        """Returns the name of the field that the engine's `structured_outputs` come from."""
        return "structured_outputs" if self.response_format is None else "response_format"

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream=true", param="stream_options")
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise ApiError(400, f"{name} is only for use_beam_search=true", param=name)
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs is not supported with stream"
            raise ApiError(400, message, param="prompt_logprobs")


class Refusing(RequestObject):
    """A request that refuses what no request honours, and what only chats honour."""

    known = by_name(*OF_CHATS, *REFUSED)


Prompts = Annotated[
    str | Items[str] | Items[TokenId] | Items[Items[TokenId]],
    one_of("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]


class CompletionRequest(with_parameters("completions", GenerationRequest)):  # type: ignore[misc]
    """A request to POST /v1/completions."""

    lengths = ("max_tokens",)

    prompt: Prompts = ""
    # Vectors in place of a prompt, each an array as base64; see vectors.py.
    prompt_embeds: Annotated[str | Items[str], one_of("a string or a list of strings")] | None = (
        None
    )
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Returns the number of most likely tokens whose log probabilities are asked for."""
        return self.logprobs  # type: ignore[no-any-return]


Texts = Annotated[str | Items[str], one_of("a string, or a list of strings")]


def _as_image_url(value: Any) -> Any:
    """Returns the object for a URL that stands alone, as some clients send it."""
    return {"url": value} if isinstance(value, str) else value


class TextPart(RequestObject):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestObject):
    """Holds a picture as a data URL."""

    # The processor of the model decides on the size.
    known = by_name(table.Field("detail", neutral=("auto",)))

    url: str


class ImagePart(RequestObject):
    """A part of a message's content that is a picture."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_as_image_url)]


Content = Annotated[
    str | Items[TextPart],
    one_of("a string, or a list of parts of type 'text'", kinds=("text",)),
]
PicturedContent = Annotated[
    str | Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
    one_of(
        "a string, or a list of parts of type 'image_url' or 'text'", kinds=("text", "image_url")
    ),
]


class SystemMessage(RequestObject):
    """A message that instructs the model."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestObject):
    """A message of the user."""

    role: Literal["user"]
    content: PicturedContent
    name: str | None = None


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

    known = by_name(table.Field("annotations", neutral=([],)))
    added = frozenset({"parsed"})

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
    content: PicturedContent
    tool_call_id: CallId
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class ReasoningOptions(RequestObject):
    """Says how much is reasoned, as OpenRouter's clients write it."""

    effort: Effort | None = None
    max_tokens: Number | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # the answer leaves out the reasoning


class ThinkingOptions(RequestObject):
    """Says how much is reasoned, as LiteLLM writes it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Number | None = None


class ConversationFields(RequestObject):
    """Holds the fields from which a chat template renders a prompt."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[Items[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Both become variables of the chat template, where it has them; see thinking.py.
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # Other forms of `reasoning_effort` and `thinking_token_budget`; see thinking.py.
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None


class ChatCompletionRequest(with_parameters("chats", GenerationRequest), ConversationFields):  # type: ignore[misc]
    """A request to POST /v1/chat/completions."""

    lengths = ("max_tokens", "max_completion_tokens")

    max_completion_tokens: Count | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice,
            one_of(
                "'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}}, "
                "{'type': 'custom', 'custom': {'name': ...}}, or "
                "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}"
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    # A stream says how much of the prompt is computed, as llama.cpp's does.
    return_progress: bool | None = None
    store: bool | None = None  # has no effect: no completion is kept

    @property
    def num_logprobs(self) -> int | None:
        """Returns the number of most likely tokens whose log probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is only for logprobs=true", param="top_logprobs")
        new, old = self.max_completion_tokens, self.max_tokens  # two names of one thing
        if None not in (new, old) and new != old:
            message = f"max_completion_tokens={new} and max_tokens={old} differ; give one of them"
            raise ApiError(400, message, param="max_completion_tokens")


class TruncatingRequest(Refusing):
    """A request whose prompts may be cut."""

    known = Refusing.known | by_name(*OF_TRUNCATION)

    # The tokens that stay of a prompt, special ones included; -1 for `max_model_len`.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: Side | None = None
    # Both are names for `truncate_prompt_tokens` = -1 in other APIs.
    truncate: bool | None = None
    truncation: bool | None = None

    def truncation_in(self, context: ModelContext) -> Truncation | None:
        """Returns how prompts are cut; None if they are not.

        Raises:
            ApiError: More tokens shall stay than the model takes.
        """
        cuts_to = self.truncate_prompt_tokens
        if cuts_to is None and (self.truncate or self.truncation):
            cuts_to = -1
        try:
            return truncation_of(cuts_to, context.max_model_len, self.truncation_side)
        except ValueError as error:
            raise ApiError(400, str(error), param="truncate_prompt_tokens") from None


class EmbeddingRequest(with_parameters("vectors", TruncatingRequest)):  # type: ignore[misc]
    """A request to POST /v1/embeddings."""

    model: ModelName
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None  # only the model's own width is accepted
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(with_parameters("scores", Refusing)):  # type: ignore[misc]
    """A request to POST /v1/score; a single prompt goes with all continuations."""

    model: ModelName
    prompt: Prompts
    continuation: Prompts
    add_special_tokens: bool | None = None


class RerankDocument(RequestObject):
    """A document of a request to POST /v1/rerank."""

    text: str


class PairScoreRequest(with_parameters("rankings", TruncatingRequest)):  # type: ignore[misc]
    """A request to POST /v1/score for the scores of pairs of texts; see pair_scores.py."""

    known = TruncatingRequest.known | by_name(*OF_RANKINGS)

    model: ModelName
    text_1: Texts | None = None
    text_2: Texts | None = None
    # Other names of the two.
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None


class RerankRequest(with_parameters("rankings", TruncatingRequest)):  # type: ignore[misc]
    """A request to POST /v1/rerank."""

    known = TruncatingRequest.known | by_name(*OF_RANKINGS)

    model: ModelName
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        Items[str] | Items[RerankDocument],
        one_of("a list of strings, or a list of objects with a text"),
    ]
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None


class TokenizeRequest(Refusing):
    """A request to POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Refusing, ConversationFields):
    """A request to POST /tokenize with a conversation."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Refusing):
    """A request to POST /detokenize."""

    model: str | None = None
    tokens: Items[TokenId]
