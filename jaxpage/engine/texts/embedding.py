"""Says how texts become vectors: what is put before them, and which of their tokens count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from jaxpage.checkpoints import EmbeddingFiles
from jaxpage.engine.calls import normalise
from jaxpage.errors import UnsupportedError
from jaxpage.outputs import Pooling, TokenPooling
from jaxpage.settings.argument_checks import check_choice, show
from jaxpage.settings.sampling_params import SamplingParams

_MODES = {"last": "lasttoken", "mean": "mean", "cls": "cls"}


@dataclass(frozen=True)
class TextEmbedding:
    """Applies what the files of a model say of embeddings.

    Attributes:
        files: What the files say.
        tokenizer: The tokenizer of the model, or None.
    """

    # The parameters of a request whose prompt becomes a vector. Nothing is drawn after the prompt.
    # Its prompt may be as long as `max_model_len`, because it is scored (`Admission._max_length`).
    params: ClassVar[SamplingParams] = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0
    )

    files: EmbeddingFiles = field(default_factory=EmbeddingFiles)
    tokenizer: Any | None = None

    def pooling(self, requested: Pooling | None, prompt: str) -> TokenPooling:
        """Returns how the tokens of a text become one vector.

        Args:
            requested: The way that a call asks for; None for that of the files.
            prompt: The text that was put before.

        Raises:
            ValueError: The way is unknown.
        """
        if requested is not None:
            check_choice("pooling", requested, get_args(Pooling))
        modes = self.files.modes if requested is None else (_MODES[requested],)
        return TokenPooling(modes, 0 if self.files.include_prompt else self._num_tokens(prompt))

    def add_prompts(
        self, prompts: Any, requested: Pooling | None
    ) -> tuple[list[dict[str, Any]], list[TokenPooling]]:
        """Returns prompts after the default prompt of the files, and how each is pooled.

        Token ids stay as they are.

        Args:
            prompts: One prompt or several; see `LLM.generate`.
            requested: The way of pooling that a call asks for, or None.

        Raises:
            CheckpointError: Something in the files is not supported.
            TypeError: The prompts have none of the forms that there are.
            UnsupportedError: A prompt has vectors in place of tokens.
            ValueError: The way of pooling is unknown.
        """
        self.files.check()
        before = self.files.default_prompt
        plain = self.pooling(requested, "")
        prefixed = self.pooling(requested, before)
        prefixed_prompts: list[dict[str, Any]] = []
        poolings = []
        for prompt in normalise(prompts):
            if prompt.vectors is not None:
                raise UnsupportedError("embed takes texts and token ids, no prompt_embeds")
            if prompt.pictures:
                raise UnsupportedError("embed takes texts and token ids, no pictures")
            if prompt.token_ids is None:
                prefixed_prompts.append({"prompt": f"{before}{prompt.text}"})
                poolings.append(prefixed)
            else:
                # Token ids are taken as they are, without the model's default prompt.
                text = {} if prompt.text is None else {"prompt": prompt.text}
                prefixed_prompts.append({**text, "prompt_token_ids": list(prompt.token_ids)})
                poolings.append(plain)
        return prefixed_prompts, poolings

    def _num_tokens(self, prompt: str) -> int:
        """Returns the number of tokens with which a text begins that comes after this prompt."""
        if not prompt or self.tokenizer is None:
            return 0
        ids = self.tokenizer(prompt)["input_ids"]
        ends = set(getattr(self.tokenizer, "all_special_ids", ()))
        # A special token at the end comes after the whole text, not after the prompt.
        return len(ids) - (1 if len(ids) > 1 and ids[-1] in ends else 0)


def check_dimensions(dimensions: Any) -> int | None:
    """Returns the number of dimensions that a call asks for, or None.

    Raises:
        ValueError: It is no integer of at least 1.
    """
    is_count = isinstance(dimensions, int) and not isinstance(dimensions, bool) and dimensions > 0
    if dimensions is not None and not is_count:
        raise ValueError(f"dimensions must be an integer of at least 1, not {show(dimensions)}")
    count: int | None = dimensions
    return count
