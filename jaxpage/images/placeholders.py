"""Knows what stands for a picture in the prompts of each family of models.

A prompt has one marker for each picture, which the chat template writes. A rule says what takes its
place, as the processors of transformers do:

    Qwen VL     <|image_pad|>      <|image_pad|> for each row of the encoder
    SmolVLM     <image>            for each tile <fake_token_around_image><row_1_col_2><image>...
    Gemma 3     <start_of_image>   <start_of_image><image_soft_token>...<end_of_image>
    Pixtral     [IMG]              for each row of patches [IMG]...[IMG][IMG_BREAK]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxpage.images.processor_settings import ProcessorSettings

_Arrays = Mapping[str, Any]


class PlaceholderRule(Protocol):
    """Says what stands for a picture in a prompt.

    Attributes:
        marker: The text of a prompt that stands for one picture.
        token: The token whose input is a row of the encoder.
        is_whole: True if the tokens of a picture see each other both ways.
        options: The arguments of the image processor that the rule needs.
        notes: The arrays that are for the rule, and not for the encoder.
    """

    marker: str
    token: str
    is_whole: bool
    options: Mapping[str, Any]
    notes: frozenset[str]

    def text_of(self, arrays: _Arrays) -> str:
        """Returns what takes the place of the marker, of the arrays of the picture."""
        ...


class _GridRule:
    """The rule of Qwen VL: a token for each patch of the merged grid."""

    is_whole = False
    options: Mapping[str, Any] = {}
    notes: frozenset[str] = frozenset()

    def __init__(self, tokenizer: Any, settings: ProcessorSettings, config: _Arrays) -> None:
        self.marker = self.token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        self._merged = int(settings.arguments.get("merge_size", 2)) ** 2

    def text_of(self, arrays: _Arrays) -> str:
        """Returns what takes the place of the marker."""
        return self.token * (int(arrays["image_grid_thw"][0].prod()) // self._merged)


class _TilesRule:
    """The rule of Idefics 3 and SmolVLM: tiles by rows and columns, and then the whole picture."""

    is_whole = False
    options: Mapping[str, Any] = {"return_row_col_info": True}
    notes = frozenset({"rows", "cols"})

    def __init__(self, tokenizer: Any, settings: ProcessorSettings, config: _Arrays) -> None:
        self.marker = self.token = getattr(tokenizer, "image_token", None) or "<image>"
        self._border = getattr(tokenizer, "fake_image_token", None) or "<fake_token_around_image>"
        self._whole = getattr(tokenizer, "global_image_token", None) or "<global-img>"
        # 169 is the default of transformers' Idefics3Processor.
        self._tile = self.token * int(settings.of_prompts.get("image_seq_len", 169))

    def text_of(self, arrays: _Arrays) -> str:
        """Returns what takes the place of the marker."""
        num_rows = int(arrays["rows"].item())
        num_columns = int(arrays["cols"].item())
        lines = [
            "".join(
                f"{self._border}<row_{row}_col_{column}>{self._tile}"
                for column in range(1, num_columns + 1)
            )
            for row in range(1, num_rows + 1)
        ]
        whole = f"{self._border}{self._whole}{self._tile}{self._border}"
        # There is a line break after each row of tiles, and one more before the whole picture.
        return "\n".join([*lines, "", whole]) if lines else whole


class _Gemma3Rule:
    """The rule of Gemma 3: a fixed number of tokens."""

    is_whole = True
    # The processor of transformers sets these, whatever the files say.
    options: Mapping[str, Any] = {"do_convert_rgb": True, "do_pan_and_scan": False}
    notes = frozenset({"num_crops"})

    def __init__(self, tokenizer: Any, settings: ProcessorSettings, config: _Arrays) -> None:
        self.marker = getattr(tokenizer, "boi_token", None) or "<start_of_image>"
        self.token = getattr(tokenizer, "image_token", None) or "<image_soft_token>"
        end = getattr(tokenizer, "eoi_token", None) or "<end_of_image>"
        # 256 is the default of transformers' Gemma3Processor.
        tokens = self.token * int(settings.of_prompts.get("image_seq_length", 256))
        self._picture = f"\n\n{self.marker}{tokens}{end}\n\n"

    def text_of(self, arrays: _Arrays) -> str:
        """Returns what takes the place of the marker."""
        return self._picture


class _Gemma4Rule:
    """The rule of Gemma 4: as many tokens as the pooled patches of the picture."""

    options: Mapping[str, Any] = {}
    notes = frozenset({"num_soft_tokens_per_image"})

    def __init__(self, tokenizer: Any, settings: ProcessorSettings, config: _Arrays) -> None:
        self.marker = self.token = getattr(tokenizer, "image_token", None) or "<|image|>"
        self._begin = getattr(tokenizer, "boi_token", None) or "<|image>"
        self._end = getattr(tokenizer, "eoi_token", None) or "<image|>"
        text_config = config.get("text_config") or {}
        self.is_whole = text_config.get("use_bidirectional_attention") == "vision"

    def text_of(self, arrays: _Arrays) -> str:
        """Returns what takes the place of the marker."""
        num_tokens = int(arrays["num_soft_tokens_per_image"][0])
        return f"{self._begin}{self.token * num_tokens}{self._end}"


class _RowsRule:
    """The rule of Pixtral: a token for each merged patch, and one that ends each row of them."""

    is_whole = False
    notes: frozenset[str] = frozenset()

    def __init__(self, tokenizer: Any, settings: ProcessorSettings, config: _Arrays) -> None:
        fields = settings.of_prompts
        self.marker = self.token = str(fields.get("image_token", "[IMG]"))
        self._break = str(fields.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(fields.get("image_end_token", "[IMG_END]"))
        self._side = int(fields.get("patch_size", 16)) * int(fields.get("spatial_merge_size", 1))
        # The processor makes both sides whole numbers of this, and rows need merged patches.
        self.options: Mapping[str, Any] = {"patch_size": self._side}

    def text_of(self, arrays: _Arrays) -> str:
        """Returns what takes the place of the marker."""
        height, width = (int(side) // self._side for side in arrays["image_sizes"][0])
        rows = (self.token * width + self._break) * height
        return rows.removesuffix(self._break) + self._end


_RULES: Mapping[str, Callable[..., PlaceholderRule]] = {
    "Gemma3ImageProcessor": _Gemma3Rule,
    "Gemma4ImageProcessor": _Gemma4Rule,
    "Idefics3ImageProcessor": _TilesRule,
    "PixtralImageProcessor": _RowsRule,
    "Qwen2VLImageProcessor": _GridRule,
    "SmolVLMImageProcessor": _TilesRule,
}


def rule_of(
    settings: ProcessorSettings, tokenizer: Any, config: Mapping[str, Any]
) -> PlaceholderRule | None:
    """Returns the rule of a model, or None if its image processor is not known.

    Args:
        settings: The settings of its image processor.
        tokenizer: Its tokenizer, which may name the tokens.
        config: The content of its config.json.
    """
    rule = _RULES.get(settings.kind)
    return None if rule is None else rule(tokenizer, settings, config)
