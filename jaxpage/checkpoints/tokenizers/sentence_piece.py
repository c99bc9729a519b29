"""Builds the tokenizer of a directory that has only tokenizer.model: SentencePiece's BPE.

The special tokens are SentencePiece's own. transformers treats such a file as a tokenizer of no
known class, and leaves out the mark of a space before a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

from jaxpage.checkpoints.files import has_file
from jaxpage.checkpoints.tokenizers.gguf_tokenizer import add_tokens, sentence_piece
from jaxpage.errors import CheckpointError

_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
_BPE = 2
_USER_DEFINED = 4
# The flags of their tokens are in tokenizer_config.json.
_NEED_CONFIG = ("added_tokens.json", "special_tokens_map.json")


def sentence_piece_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of `tokenizer.model`, without tokenizer.json and its config.

    Raises:
        CheckpointError: The file is damaged, or it cuts text in another way than Llama's: as a
            unigram model, or after it has changed characters or spaces.
    """
    path = directory / "tokenizer.model"
    model = import_protobuf().ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # The library that reads it may raise anything.
        raise CheckpointError(f"{path}: it is no SentencePiece model: {error!s:.200}") from error
    if problem := _problem(directory, model):
        raise CheckpointError(
            f"{path}: without tokenizer_config.json its tokenizer cannot be built: {problem}. Give "
            "the directory of the model's "
            "own tokenizer with tokenizer= (--tokenizer)"
        )
    tokens = [piece.piece for piece in model.pieces]
    added = {
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],  # GGUF has SentencePiece's numbers.
        "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
    }
    backend = sentence_piece(
        path, added, {token: token_id for token_id, token in enumerate(tokens)}
    )
    add_tokens(backend, tokens, added["token_type"])
    spec = model.trainer_spec
    ids = {
        "bos_token": spec.bos_id,
        "eos_token": spec.eos_id,
        "unk_token": spec.unk_id,
        "pad_token": spec.pad_id,
    }
    special = {
        name: tokens[token_id] for name, token_id in ids.items() if 0 <= token_id < len(tokens)
    }
    template = directory / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        clean_up_tokenization_spaces=False,
        add_bos_token="bos_token" in special,
        add_eos_token=False,
        **special,
    )


def _problem(directory: Path, model: Any) -> str | None:
    kind = model.trainer_spec.model_type
    rules = model.normalizer_spec
    if not model.pieces or len({piece.piece for piece in model.pieces}) < len(model.pieces):
        return "its pieces are none, or not all different"
    if kind != _BPE:
        return f"it is a {_KINDS.get(kind, kind)} model, and only BPE is known"
    if any(piece.type == _USER_DEFINED for piece in model.pieces):
        return "it has tokens that its maker defined, after which SentencePiece sets no mark"
    if rules.precompiled_charsmap:
        return f"it changes characters first ({rules.name or 'by a table of its own'})"
    if rules.remove_extra_whitespaces:
        return "it removes spaces first (remove_extra_whitespaces)"
    if not rules.escape_whitespaces or model.trainer_spec.treat_whitespace_as_suffix:
        return (
            "it puts the mark of a space elsewhere (escape_whitespaces, treat_whitespace_as_suffix)"
        )
    present = [name for name in _NEED_CONFIG if has_file(directory, name)]
    return f"there is {' and '.join(present)}" if present else None
