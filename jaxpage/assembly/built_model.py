"""Defines the base of `LLM` and `AsyncLLM`, which knows their model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpage.assembly.assembling import Built
from jaxpage.assembly.model_weights import check_replaceable, checkpoint_parts
from jaxpage.checkpoints import in_memory
from jaxpage.checkpoints.tokenizers import whole_tokenizer
from jaxpage.engine.calls import (
    chat_prompt,
    check_token_ids,
)
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams


class BuiltModel:
    """Knows the settings, the tokenizer and the weights of a model whose engine was built."""

    def _use(self, config: EngineConfig, built: Built) -> None:
        self.config = config
        self._tokenizer = built.tokenizer
        self.spec = built.spec
        self.memory = built.memory
        # The sampling parameters of the model's generation_config.json.
        self.sampling_defaults = built.sampling_defaults
        self._model = built.model
        self._packed = built.engine.packed
        self._embedder = built.new_embedder()
        self._embedding = built.embedding
        self._pictures = built.pictures
        self._checksum_of = built.checksum_of

    @property
    def max_model_len(self) -> int:
        """Returns the most tokens of a sequence, prompt and output together."""
        return self.memory.max_model_len

    @property
    def hf_config(self) -> dict[str, Any]:
        """Returns the content of the model's config.json."""
        return dict(self._model.config)

    def chat_prompt(
        self,
        messages: Any,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the prompt of a conversation, by the model's chat template.

        Args:
            messages: The messages, each a dict with "role" and "content", which is a text or a list
                of parts: {"type": "text", "text": ...}, or {"type": "image", "image": ...} with a
                path, bytes or a PIL.Image.
            tools: Functions as JSON schemas or in the form of OpenAI's client, if the template
                takes tools.
            chat_template_kwargs: Variables of the template, such as enable_thinking.

        Raises:
            ValueError: The model has no chat template, the template refuses the messages or lacks a
                variable, or a picture is refused.
            UnsupportedError: A message has a picture, and the model takes none.
            TypeError: The messages are no list of dicts.
        """
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(f"The model {self.config.model!r} has no chat template; use generate")
        return chat_prompt(
            self._tokenizer, messages, tools, chat_template_kwargs or {}, self._pictures
        )

    @property
    def tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, or None if the model has none."""
        return whole_tokenizer(self._tokenizer)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, or None if the model has none."""
        return self.tokenizer

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens.

        Args:
            token_ids: A list of token ids, or an array with one axis.
            skip_special_tokens: True leaves special tokens out.

        Raises:
            TypeError: The token ids are no list of integers.
            ValueError: The model has no tokenizer, or has no such id.
        """
        if self._tokenizer is None:
            raise ValueError(f"The model {self.config.model!r} has no tokenizer")
        checked = check_token_ids(token_ids, self.spec.vocab_size)
        return str(self._tokenizer.decode(checked, skip_special_tokens=skip_special_tokens))

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Returns the sampling parameters of the model's generation_config.json.

        Args:
            **overrides: Fields of `SamplingParams` that replace those of the file.
        """
        return SamplingParams(**{**self.sampling_defaults, **overrides})

    def _by_checkpoint_name(self, parameters: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the weights of a checkpoint by their names in it.

        Args:
            parameters: The parameters of the steps, as they are on the device.
        """
        check_replaceable(self._model, "parameters")
        return {
            name: array
            for plan, weights in checkpoint_parts(self._model, self.spec, self._packed, parameters)
            for name, array in in_memory.name_parameters(plan, weights).items()
        }

    def __repr__(self) -> str:
        names = ("max_model_len", "num_blocks", "block_size", "device")
        sizes = ", ".join(f"{name}={getattr(self.memory, name)!r}" for name in names)
        return (
            f"{type(self).__name__}(model={self.config.model!r}, "
            f"dtype={self.spec.layout.dtype!r}, {sizes})"
        )
