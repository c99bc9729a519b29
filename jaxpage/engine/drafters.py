"""Drafters with weights of their own, opened beside the model that they draft for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.checkpoints import load_weights, open_model, resolve_model
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.device.buckets import BucketMenu
from jaxpage.device.drafting import DrafterOptions
from jaxpage.models.base import KVSpec, abstract
from jaxpage.models.draft_model import DraftModel
from jaxpage.models.drafter import WithDrafter
from jaxpage.speculative_config import SpeculativeConfig

# Trees as EAGLE-2 grows them: 60 drafts of 10 branches and depth 6 for the largest models; fewer branches where there are fewer drafts.
DEEPEST_TREE = 6
MOST_BRANCHES = 8
METHODS = ("draft_model", "eagle", "eagle3")


@dataclass(frozen=True)
class OpenDrafter:
    """A drafter that fits its target. Nothing of it but headers has been read, and nothing is on a device."""

    kv: KVSpec  # of its own layers
    taps: tuple[int, ...] | None  # see models.drafter.Drafter
    make: Callable[[DTypeLike], nnx.Module]  # a models.drafter.Drafter
    num_bytes: Callable[[str], int]  # of its own weights in a dtype
    read: Callable[..., dict[str, Any]]  # its own parameters: of dtype, put, progress

    def options(self, dtype: str, menu: BucketMenu, first_layer: int, num_blocks: int, *, tree: bool) -> DrafterOptions:
        """How it drafts in steps of these shapes.

        first_layer: layers of its target. num_blocks: of the pool. tree: drafts may branch.
        """
        most_drafts = max(bucket.max_query_len - 1 for bucket in menu.verify)
        return DrafterOptions(
            graph=abstract(lambda: self.make(jnp.dtype(dtype)))[0],
            taps=self.taps,
            first_layer=first_layer,
            num_levels=min(most_drafts, DEEPEST_TREE) if tree else most_drafts,
            num_branches=min(MOST_BRANCHES, 1 + math.isqrt(most_drafts)) if tree else 1,
            most_rows=max(bucket.num_rows for bucket in menu.verify),
            num_blocks=num_blocks,
        )

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
    return _draft_model(config.model, target)


def _draft_model(model: str, target: ModelFiles) -> OpenDrafter:
    files = open_model(resolve_model(model))

    def read(dtype: str, put: Callable[[Any], Any], *, progress: bool) -> dict[str, Any]:
        return {"model": load_weights(files.plan, dtype, put, progress=progress)}

    return OpenDrafter(
        files.spec.kv,
        None,
        lambda dtype: DraftModel(files.family, files.spec, vocab_size=target.spec.vocab_size, dtype=dtype),
        files.plan.num_bytes,
        read,
    )
