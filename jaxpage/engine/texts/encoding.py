"""Encodes a text or a pair of texts, cut where a call asks for it.

A prompt that is too long is cut as tokenizers of transformers do it with `truncation=True`: special
tokens stay, and of two texts the longer one is cut first. That truncation is a setting of the
tokenizer, which other threads share, and so it is not used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxpage.settings.argument_checks import show

Side = Literal["left", "right"]


class Truncation(NamedTuple):
    """Says how a prompt that is too long is cut.

    Attributes:
        maximum: The tokens that stay at most, special tokens included.
        side: The side at which tokens are left out; None for that of the tokenizer.
    """

    maximum: int
    side: Side | None = None

    def cut(self, token_ids: Sequence[int], tokenizer: Any) -> tuple[int, ...]:
        """Returns the token ids of a prompt that stay."""
        return tuple(_cut(token_ids, self.maximum, self._side_of(tokenizer)))

    def places(self, encoding: Any, tokenizer: Any) -> list[int]:
        """Returns the places of the tokens that stay of one text or two.

        Args:
            encoding: The texts, as the `tokenizers` library encodes them.
            tokenizer: The tokenizer.

        Raises:
            ValueError: The special tokens leave no room for the texts.
        """
        sequences = encoding.sequence_ids
        texts = [
            [index for index, sequence in enumerate(sequences) if sequence == number]
            for number in range(encoding.n_sequences)
        ]
        num_special = sequences.count(None)
        room = self.maximum - num_special
        if room < len(texts):
            raise ValueError(
                f"truncate_prompt_tokens={self.maximum} leaves no room for text: the tokenizer adds "
                f"{num_special} special tokens"
            )
        side = self._side_of(tokenizer)
        lengths = share_room([len(text) for text in texts], room)
        left = {
            place
            for text, length in zip(texts, lengths, strict=True)
            for place in _cut(text, length, side)
        }
        return [index for index, number in enumerate(sequences) if number is None or index in left]

    def _side_of(self, tokenizer: Any) -> str:
        if self.side is not None:
            return self.side
        side: str = getattr(tokenizer, "truncation_side", "right")
        return side


class Encoded(NamedTuple):
    """Holds the tokens of a text or of two.

    Attributes:
        token_ids: The tokens, special tokens included.
        second_text: The place of the first token whose token type is 1; None if there is none.
    """

    token_ids: tuple[int, ...]
    second_text: int | None = None


def encode(
    tokenizer: Any,
    *texts: str | None,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
) -> Encoded:
    """Returns the tokens of a text, or of two that a cross-encoder reads together.

    Any thread may call this.

    Args:
        tokenizer: The tokenizer of the model.
        texts: The text, or the two.
        add_special_tokens: True if the tokenizer adds its special tokens.
        truncation: The way in which they are cut; None if they are not.

    Raises:
        ValueError: The tokenizer gives up on a text, or a truncation leaves no room for it.
    """
    has_types = {"return_token_type_ids": True} if len(texts) > 1 else {}
    try:
        encoding = tokenizer(*texts, add_special_tokens=add_special_tokens, **has_types)
    except BaseException as panic:
        # If a regular expression of tokenizer.json fails, Rust raises an error that is no
        # Exception.
        if isinstance(panic, Exception) or type(panic).__name__ != "PanicException":
            raise
        raise ValueError("prompt: the model's tokenizer gives up on this text") from None
    ids: Sequence[int] = encoding["input_ids"]
    types: Sequence[int] = encoding["token_type_ids"] if has_types else ()
    if truncation is not None and len(ids) > truncation.maximum:
        if not encoding.encodings:
            raise ValueError(
                "truncate_prompt_tokens is not supported: the model's tokenizer is written in "
                "Python and does not tell its special tokens; cut the text before"
            )
        places = truncation.places(encoding.encodings[0], tokenizer)
        ids = [ids[place] for place in places]
        types = [types[place] for place in places] if has_types else ()
    return Encoded(tuple(ids), types.index(1) if 1 in types else None)


def encode_together(
    tokenizer: Any, prompts: Sequence[Mapping[str, Any]], truncation: Truncation | None
) -> list[Mapping[str, Any]]:
    """Returns prompts with their token ids; those of texts come from one call of the tokenizer.

    A call for each text takes several times as long. Where the tokenizer fails, texts stay texts:
    whoever encodes them one by one tells which of them is at fault. So do texts that are cut.

    Args:
        tokenizer: The tokenizer of the model, or None.
        prompts: The prompts, each with a text or with token ids.
        truncation: The way in which prompts are cut; None if they are not.
    """
    texts = [each["prompt"] for each in prompts if "prompt_token_ids" not in each]
    if tokenizer is None or len(texts) < 2:
        return list(prompts)
    try:
        id_lists = iter(tokenizer(texts)["input_ids"])
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return list(prompts)
    maximum = None if truncation is None else truncation.maximum
    with_ids: list[Mapping[str, Any]] = []
    for prompt in prompts:
        ids = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else next(id_lists)
        is_whole = maximum is None or len(ids) <= maximum
        with_ids.append({**prompt, "prompt_token_ids": ids} if is_whole else prompt)
    return with_ids


def truncation_of(
    truncate_prompt_tokens: Any, max_model_len: int, side: Side | None = None
) -> Truncation | None:
    """Returns how the prompts of a call are cut; None if they are not.

    Args:
        truncate_prompt_tokens: The tokens that stay at most; -1 for `max_model_len`, None for no
            truncation.
        max_model_len: The tokens of the longest prompt.
        side: See `Truncation`.

    Raises:
        ValueError: The number is none of these, or is more than `max_model_len`.
    """
    if truncate_prompt_tokens is None:
        return None
    is_count = isinstance(truncate_prompt_tokens, int) and not isinstance(
        truncate_prompt_tokens, bool
    )
    if is_count and truncate_prompt_tokens == -1:
        return Truncation(max_model_len, side)
    if not is_count or not 1 <= truncate_prompt_tokens <= max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens must be 1 to {max_model_len} (max_model_len), or -1 for "
            f"{max_model_len}, not {show(truncate_prompt_tokens)}"
        )
    return Truncation(truncate_prompt_tokens, side)


def check_scored_whole(truncation: Truncation | None) -> None:
    """Raises ValueError if token ids, whose scores are asked for, shall be cut."""
    if truncation is not None:
        raise ValueError(
            f"truncate_prompt_tokens={truncation.maximum} is only for pairs of texts, which encoders "
            "score: cut token ids before"
        )


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Returns how many tokens of one text or of two stay; the longer one is cut first.

    Args:
        lengths: The number of tokens of each text.
        room: The number of tokens that stay of all of them.
    """
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    shorter, longer = sorted(lengths)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


def _cut(items: Sequence[int], length: int, side: str) -> Sequence[int]:
    return items[:length] if side == "right" else items[len(items) - min(length, len(items)) :]
