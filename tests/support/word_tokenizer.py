"""A tokenizer of words and letters, for small encoders."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers

WORDS = ("the", "cat", "is", "here", "where", "dog", "find", "query", "passage", ":", "a")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
POSITIONS = 128  # tokens of the longest text


def word_tokenizer(*, has_types: bool = True) -> Any:
    """Returns a tokenizer of words and letters, which puts texts and pairs into BERT's form."""
    names = [*SPECIAL, *WORDS, *"bcdefghijklmnopqrstuvwxyz0123456789.,"]
    model = tokenizers.models.WordPiece(
        {name: index for index, name in enumerate(names)},
        unk_token="[UNK]",
        continuing_subword_prefix="",
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    second = "1" if has_types else "0"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[(name, names.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=POSITIONS,
    )
