"""Defines the requests of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    Count,
    Effort,
    Items,
    ModelName,
    RequestObject,
    by_name,
    one_of,
    with_parameters,
)
from jaxpage.serving.wire.request_fields import Prompts
from jaxpage.settings.argument_checks import INT32_MAX
from jaxpage.settings.field_table import Field as Line

Nothing = Annotated[list[Any], Field(max_length=0), one_of("absent or empty: it is not supported")]


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


class OllamaMessage(RequestObject):
    """A message of a conversation, in Ollama's API."""

    added = frozenset({"tool_name"})

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

    known = by_name(Line("truncate", neutral=(False, True)))

    input: Prompts
    dimensions: Count | None = None  # only the model's own width is accepted


class OllamaEmbeddingsRequest(OllamaVectorsRequest):
    """A request to POST /api/embeddings, the older of the two paths."""

    prompt: str
