"""Holds what the wire format needs to know about the model and about the server's settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpage.chat_forms import ChatFormat
from jaxpage.engine.texts import (
    ByPairs,
    ByVectors,
    TextEmbedding,
    YesNo,
)
from jaxpage.images import PictureProcessor
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.logprobs import TokenTexts
from jaxpage.serving.wire.model_card import ModelCard
from jaxpage.settings.argument_checks import close_names, show
from jaxpage.settings.lora_request import LoRARequest


def unknown_model(name: str, names: Iterable[str]) -> ApiError:
    """Returns the error for the name of a model that is not served.

    Args:
        name: The name in the request.
        names: The names of the models and adapters that are served.
    """
    names = list(names)
    by_simple = {_simple(each): each for each in names}
    near = close_names(_simple(name), by_simple)
    close = close_names(name, names) or [by_simple[each] for each in near]
    hint = f"did you mean {close[0]!r}?" if close else f"this server has {show(', '.join(names))}"
    text = f"The model {show(name)} does not exist; {hint}"
    return ApiError(404, text, param="model", code="model_not_found")


def _simple(name: str) -> str:
    """Returns the name of a model without an organisation, a tag, and capitals."""
    return name.rpartition("/")[2].partition(":")[0].lower()


@dataclass(frozen=True)
class RequestLimits:
    """Holds the bounds of one request that are not bounds of its fields (request_fields.py).

    Attributes:
        max_prompts: The most prompts of a request.
        max_pictures: The most pictures of a request.
        max_sequences: The most sequences of a request: its prompts times the sequences of each.
        max_tokenize_characters: The longest text that is tokenized.
        max_detokenize_tokens: The most tokens that are detokenized.
        max_score_characters: The most characters of all prompts of a request that scores or ranks,
            where a prompt counts once for each of its continuations, and a query once for each
            document that it is read with.
        max_output_logprobs: The most log probabilities of an answer's output: its sequences times
            their tokens times 1 + the most likely tokens of each.
        max_output_hidden: The most numbers of an answer's hidden states.
    """

    max_prompts: int = 256
    max_pictures: int = 256
    max_sequences: int = 1024
    max_tokenize_characters: int = 1_000_000
    max_detokenize_tokens: int = 262_144
    max_score_characters: int = 8_000_000
    max_output_logprobs: int = 1_000_000
    max_output_hidden: int = 64_000_000


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Holds one model as its clients see it.

    Attributes:
        model_names: The names of the model; any of them may be used.
        adapters: The LoRA adapters by name. Adapters come and go while the server runs.
        max_model_len: The most tokens of a sequence, prompt and output together.
        vocab_size: The width of the logits (V); token ids are smaller.
        hidden_size: The width of the hidden states (D); 0 if it is not known.
        tokenizer: The tokenizer of transformers. None if there is no text.
        sampling_defaults: The fields of SamplingParams where a request does not set them.
        system_fingerprint: The fingerprint of the weights at the start; empty for none.
        card: The description of the model's files.
        chat_format: The form of tool calls and reasoning in answers.
        no_form: The reason why the chat template's tool calls have no form, or None.
        strict_requests: True if unknown fields are refused.
        limits: The bounds of one request.
        reranker: The way in which the model ranks documents.
        embedding: The way in which texts become vectors.
        generates: False for an encoder, which embeds and ranks alone.
        pictures: The processor of pictures; None if the model takes none.
    """

    model_names: tuple[str, ...]
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    tokenizer: Any | None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    system_fingerprint: str = ""
    card: ModelCard = field(default_factory=ModelCard)
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    no_form: str | None = None
    strict_requests: bool = False
    limits: RequestLimits = RequestLimits()
    reranker: YesNo | ByVectors | ByPairs = field(default_factory=ByVectors)
    embedding: TextEmbedding = field(default_factory=TextEmbedding)
    generates: bool = True
    pictures: PictureProcessor | None = None

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Returns the adapter that a request's `model` names; None for the model itself.

        Raises:
            ApiError: No model or adapter of this name is served.
        """
        if name is None or name in self.model_names:
            return None
        if (adapter := self.adapters.get(name)) is None:
            raise unknown_model(name, (*self.model_names, *self.adapters))
        return adapter

    def fingerprint(self, weights_version: int) -> str | None:
        """Returns the fingerprint for an answer, or None if there is none.

        If the weights were replaced after the start, the version of the weights follows it.
        """
        if not self.system_fingerprint:
            return None
        return (
            f"{self.system_fingerprint}-{weights_version}"
            if weights_version
            else self.system_fingerprint
        )

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Returns the ids of the tokens that decoding leaves out, by their texts."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        named = set(getattr(self.tokenizer, "all_special_tokens", ()))
        return {
            str(token): token_id
            for token_id, token in added.items()
            if token.special or str(token) in named
        }

    @functools.cached_property
    def has_special_marks(self) -> tuple[bool, bool]:
        """Returns whether leaving out special tokens would leave out marks of the model's answers.

        The first value is for answers without tools, the second one for those with tools.
        """

        def is_special(marks: Iterable[str]) -> bool:
            return any(token in mark for mark in marks for token in self.special_tokens)

        form = self.chat_format
        return is_special(form.markers(with_tools=False)), is_special(form.markers(with_tools=True))

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """Returns what gives tokens their names."""
        return TokenTexts(self.tokenizer)

    @functools.cached_property
    def max_prompt_characters(self) -> int:
        """Returns a number of characters that no text which fits in the model exceeds.

        Longer texts are refused before they are encoded, because encoding takes time.
        """
        max_characters = (
            max(map(len, self.tokenizer.get_vocab()), default=1)
            if self.tokenizer is not None
            else 1
        )
        return self.max_model_len * max_characters

    @property
    def takes_pictures(self) -> bool:
        """Returns whether the model takes pictures."""
        return self.pictures is not None

    def check_prompt(
        self,
        prompt: str | Sequence[int],
        param: str,
        num_pictures: int = 0,
        *,
        is_cut: bool = False,
    ) -> str | tuple[int, ...]:
        """Returns the prompt of a request, with token ids as a tuple.

        Args:
            prompt: The text or the token ids.
            param: The field that the prompt came from.
            num_pictures: The number of its pictures.
            is_cut: True if a prompt that is too long is cut; it may have as many characters as a
                text that is tokenized.

        Raises:
            ApiError: The text is certainly too long or is not valid Unicode, there is no tokenizer,
                or the text has not one marker for each picture.
        """
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise ApiError(
                400, "The model has no tokenizer; give the prompt as token ids", param=param
            )
        if not is_cut:
            self.check_length(prompt, param)
        elif len(prompt) > (max_characters := self.limits.max_tokenize_characters):
            message = f"{param} has {len(prompt)} characters; at most {max_characters} are cut"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if self.pictures is not None:
            try:
                self.pictures.check_text(prompt, num_pictures)
            except ValueError as error:
                raise ApiError(400, f"{param}: {error}", param=param) from None
        return valid_text(prompt, param)

    def check_length(self, text: str, param: str) -> None:
        """Raises ApiError for a text with more characters than any text that fits in the model."""
        if len(text) > self.max_prompt_characters:
            message = (
                f"The prompt has {len(text)} characters, which cannot fit in "
                f"max_model_len={self.max_model_len} tokens"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def valid_text(text: str, param: str) -> str:
    """Returns the text if UTF-8 can express it, because tokenizers take no other.

    Raises:
        ApiError: The text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, f"{param} contains invalid Unicode: a lone surrogate", param=param
        ) from None
    return text
