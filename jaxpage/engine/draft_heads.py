"""Heads that guess ahead of a model: opened beside it, and what an engine that has them needs to know of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpage.checkpoints.medusa_files import MEDUSA_FILES, MedusaFiles, load_medusa, open_medusa
from jaxpage.checkpoints.resolve import resolve_model
from jaxpage.errors import ConfigError
from jaxpage.models.base import ModelSpec, abstract
from jaxpage.models.medusa import MedusaHeads, WithHeads
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation.medusa import Choices, MedusaProposer, assumed_accuracies, best_only, likeliest_first, search


@dataclass(frozen=True)
class DraftHeads:
    """Heads that fit, and the tree of their guesses that is drafted."""

    files: MedusaFiles
    choices: Choices

    @property
    def num_guesses(self) -> int:
        """W: of each head, that any draft uses."""
        return 1 + max(rank for path in self.choices for rank in path)

    def num_bytes(self, dtype: str) -> int:
        return self.files.num_bytes(dtype)

    def graph(self, dtype: str) -> Any:
        """Of the heads' parameters."""
        return abstract(MedusaHeads(self.files.spec, dtype=dtype))[0]

    def proposer(self) -> MedusaProposer:
        return MedusaProposer(self.choices)

    def load(self, parameters: Any, dtype: str, device: jax.Device, *, progress: bool) -> WithHeads:
        """Beside the model's parameters, on their device and in their dtype."""
        put: Callable[[Any], Any] = functools.partial(jax.device_put, device=device)
        return WithHeads(parameters, load_medusa(self.files, dtype, put, progress=progress))


def open_heads(config: SpeculativeConfig | None, target: ModelSpec, most_drafts: int) -> DraftHeads | None:
    """None for a configuration without heads. Nothing but headers is read.

    Args:
        most_drafts: of a sequence in a step.

    Raises:
        ModelNotFoundError, CheckpointError: there are no heads, or they do not fit the model.
        ConfigError: more is asked of the heads than they guess.
    """
    if config is None or config.method != "medusa":
        return None
    assert config.model is not None, "checked with the settings"
    directory = resolve_model(config.model, hub_files=MEDUSA_FILES)
    files = open_medusa(directory, model_width=target.model_width, vocab_size=target.vocab_size)
    num_heads, wanted = files.spec.num_heads, config.num_speculative_tokens
    accuracies = files.accuracies or assumed_accuracies(num_heads)
    if config.medusa_choices is not None:
        choices = likeliest_first(config.medusa_choices, accuracies)
    elif config.tree:
        choices = search([row[: files.num_tokens] for row in accuracies], most_drafts)
    else:
        choices = best_only(num_heads, most_drafts)
    deepest = max(map(len, choices))
    if deepest > num_heads or (wanted != "auto" and len(choices) < wanted):
        asked = f"medusa_choices goes {deepest} deep" if deepest > num_heads else f"num_speculative_tokens is {wanted}"
        raise ConfigError(
            f"speculative_config: {asked}, but of the {num_heads} heads in {directory} each guesses one place, which gives "
            f"{len(choices)} drafts at most"
        )
    heads = DraftHeads(files, choices)
    if heads.num_guesses > files.num_tokens:
        raise ConfigError(
            f"speculative_config: medusa_choices asks for guess {heads.num_guesses}, of {files.num_tokens} tokens in all"
        )
    return heads
