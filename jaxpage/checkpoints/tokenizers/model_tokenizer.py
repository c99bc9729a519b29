"""Opens the tokenizer of a configuration's model, and says which tokens end its texts."""

from __future__ import annotations

import logging
from typing import Any

from jaxpage.checkpoints.config_file import eos_token_ids
from jaxpage.checkpoints.finding.resolve import resolve_model, resolve_tokenizer
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.checkpoints.problems import list_names
from jaxpage.checkpoints.tokenizers.stored_tokenizers import open_tokenizer
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)


def tokenizer_of(config: EngineConfig) -> Any | None:
    """Returns the tokenizer of a configuration's model, or None if it has none.

    Raises:
        ModelNotFoundError: There is no such model.
        CheckpointError: The tokenizer cannot be loaded, or is refused.
    """
    model = resolve_model(config.model, config.revision)
    return open_tokenizer(resolve_tokenizer(config.tokenizer) if config.tokenizer else model)


def ends_of_text(files: ModelFiles, tokenizer: Any | None) -> frozenset[int]:
    """Returns the ids that end a text: those of the model's files and the tokenizer's own.

    vLLM adds the tokenizer's too. Ids beyond the model's vocabulary are left out, with a warning.
    """
    token_ids = eos_token_ids(files.directory, files.config)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        token_ids |= {tokenizer.eos_token_id}
    beyond = {token_id for token_id in token_ids if token_id >= files.spec.vocab_size}
    if beyond:
        logger.warning(
            "eos_token_id %s can never be drawn: the model's ids end at %d",
            list_names(sorted(beyond)),
            files.spec.vocab_size - 1,
        )
    return token_ids - beyond
