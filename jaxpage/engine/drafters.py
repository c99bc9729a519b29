"""Drafters with weights of their own, opened beside the model that they draft for."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.checkpoints import load_weights, open_model, resolve_model
from jaxpage.checkpoints.eagle_files import EAGLE_FILES, Method, load_eagle, open_eagle
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.device.buckets import BucketMenu
from jaxpage.device.drafting import Choice, DrafterOptions, TreeShape
from jaxpage.engine.text import load_tokenizer
from jaxpage.errors import CheckpointError
from jaxpage.models.base import KVSpec, abstract
from jaxpage.models.draft_model import DraftModel
from jaxpage.models.drafter import WithDrafter
from jaxpage.settings.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

# Trees as EAGLE-2 grows them: 60 drafts of 10 branches and depth 6 for the largest models; fewer branches where there are fewer drafts.
DEEPEST_TREE = 6
MOST_BRANCHES = 8
METHODS = ("draft_model", "eagle", "eagle3")


@dataclass(frozen=True)
class OpenDrafter:
    """A drafter that fits its target. Nothing of it but headers has been read, and nothing is on a device."""

    kv: KVSpec  # of its own layers
    aux_layers: tuple[int, ...] | None  # see models.drafter.Drafter
    make: Callable[[DTypeLike], nnx.Module]  # a models.drafter.Drafter
    num_bytes: Callable[[str], int]  # of its own weights in a dtype
    read: Callable[..., dict[str, Any]]  # its own parameters: of dtype, put, progress

    def graph(self, dtype: str) -> Any:
        """For `models.drafter.join`."""
        return abstract(self.make(dtype))[0]

    @staticmethod
    def shape(menu: BucketMenu) -> TreeShape:
        """How far it drafts for steps of these shapes, and how wide if they take trees."""
        most_drafts = max(bucket.max_query_len - 1 for bucket in menu.verify)
        most_rows = max(bucket.num_rows for bucket in menu.verify)
        if not any(bucket.trees for bucket in menu.verify):
            return TreeShape(most_drafts, 1, most_rows)
        return TreeShape(min(most_drafts, DEEPEST_TREE), min(MOST_BRANCHES, 1 + math.isqrt(most_drafts)), most_rows)

    def options(
        self, dtype: str, menu: BucketMenu, first_layer: int, num_blocks: int, acceptance: str
    ) -> DrafterOptions:
        """How it drafts in steps of these shapes.

        Args:
            first_layer: layers of its target.
            num_blocks: of the pool.
            acceptance: the rule's name.
        """
        shape = self.shape(menu)
        choice: Choice = "coupled" if acceptance == "coupled" else "likeliest"
        if acceptance == "rejection" and shape.num_branches == 1:
            choice = "drawn"
        return DrafterOptions(self.graph(dtype), self.aux_layers, shape, first_layer, num_blocks, choice)

    def load(self, parameters: Any, dtype: str, device: jax.Device, *, progress: bool) -> WithDrafter:
        """Beside the target's parameters, on their device and in their dtype."""
        put = functools.partial(jax.device_put, device=device)
        return WithDrafter(parameters, self.read(dtype, put, progress=progress))


def open_drafter(config: SpeculativeConfig | None, target: ModelFiles) -> OpenDrafter | None:
    """None for a configuration without such a drafter. Nothing but headers is read.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedError: there is no drafter, or it does not fit the target.
    """
    if config is None or config.method not in METHODS:
        return None
    assert config.model is not None, "checked with the settings"
    if config.method == "draft_model":
        return _draft_model(config.model, target)
    files = open_eagle(resolve_model(config.model, hub_files=EAGLE_FILES), cast(Method, config.method), target)
    return OpenDrafter(
        files.spec.decoder.kv,
        files.spec.aux_layers,
        files.spec.make,
        files.num_bytes,
        functools.partial(load_eagle, files),
    )


def _draft_model(model: str, target: ModelFiles) -> OpenDrafter:
    files = open_model(resolve_model(model))
    positions, needed = files.spec.max_position_embeddings, target.spec.max_position_embeddings
    if positions < needed:
        logger.warning(
            "the draft model's positions end at %d, the model's at %d: behind that it guesses badly", positions, needed
        )
    if files.spec.vocab_size != target.spec.vocab_size:
        _check_padding(files, target)

    def read(dtype: str, put: Callable[[Any], Any], *, progress: bool) -> dict[str, Any]:
        return {"model": load_weights(files.plan, dtype, put, progress=progress)}

    return OpenDrafter(
        files.spec.kv,
        None,
        lambda dtype: DraftModel(files.family, files.spec, vocab_size=target.spec.vocab_size, dtype=dtype),
        files.plan.num_bytes,
        read,
    )


def _check_padding(files: ModelFiles, target: ModelFiles) -> None:
    """Published models of one family pad the table of one vocabulary to different lengths. Raises CheckpointError if that is not it."""
    sizes = (files.spec.vocab_size, target.spec.vocab_size)
    tokenizers = [load_tokenizer(model.directory) for model in (files, target)]
    differ = f"the draft model in {files.directory} has {sizes[0]} tokens, and the model has {sizes[1]}"
    if None in tokenizers:
        raise CheckpointError(f"{differ}: without both tokenizers it cannot be told whether the rest is padding")
    first, second = (
        {(token, token_id) for token, token_id in tokenizer.get_vocab().items() if token_id < min(sizes)}
        for tokenizer in tokenizers
        if tokenizer is not None
    )
    if first != second:
        token, token_id = min(first ^ second, key=lambda pair: pair[1])
        raise CheckpointError(f"{differ}, and only one of their tokenizers knows {token!r} as {token_id}")
