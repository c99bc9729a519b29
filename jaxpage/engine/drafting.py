"""What drafts for a model, by the settings: opened beside it, given room, put into its steps, and asked by its scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.device import kv_pages
from jaxpage.device.buckets import BucketMenu
from jaxpage.device.kv_pages import KVPages
from jaxpage.device.steps import StepOptions
from jaxpage.engine.draft_heads import DraftHeads, open_heads
from jaxpage.engine.drafters import OpenDrafter, open_drafter
from jaxpage.errors import UnsupportedError
from jaxpage.models.base import KVSpec
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.speculation import make_proposer
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.following import Following
from jaxpage.speculation.recycling import NUM_RECYCLED
from jaxpage.speculation.speculation import Speculation
from jaxpage.step.limits import StepLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafting:
    """Of an engine that does not draft all is None, and nothing changes. Nothing is on a device before `load`."""

    config: SpeculativeConfig | None = None
    heads: DraftHeads | None = None
    drafter: OpenDrafter | None = None

    @property
    def kvs(self) -> tuple[KVSpec, ...]:
        """Of layers that stand behind the model's in every block."""
        return (self.drafter.kv,) if self.drafter else ()

    @property
    def may_rest(self) -> bool:
        """Whether what drafts on the device may have no part in a step."""
        is_auto = self.config is not None and self.config.num_speculative_tokens == "auto"
        return is_auto and bool(self.heads or self.drafter)

    def num_bytes(self, dtype: str) -> int:
        """Of weights."""
        return sum(part.num_bytes(dtype) for part in (self.heads, self.drafter) if part)

    def num_scratch_blocks(self, menu: BucketMenu, block_size: int) -> int:
        """That layers of a drafter have beyond the pool's."""
        return self.drafter.shape(menu).num_scratch_blocks(block_size) if self.drafter else 0

    def load(self, parameters: Any, dtype: str, device: jax.Device, *, progress: bool) -> Any:
        """The model's parameters, and beside them whatever drafts."""
        part = self.heads or self.drafter
        return part.load(parameters, dtype, device, progress=progress) if part else parameters

    def in_steps(self, options: StepOptions, dtype: str, menu: BucketMenu, pages: KVPages) -> StepOptions:
        """pages: the model's."""
        if self.heads:
            return options._replace(num_guesses=self.heads.num_guesses, heads=self.heads.graph(dtype))
        if self.drafter:
            num_blocks = pages[0].k_pages.shape[0]
            ahead = self.drafter.options(dtype, menu, len(pages), num_blocks, options.acceptance.name)
            return options._replace(drafter=ahead)
        if self.config is not None and self.config.method == "token_recycling":
            return options._replace(num_recycled=min(NUM_RECYCLED, options.vocab_size))
        return options

    def pages(self, menu: BucketMenu, num_blocks: int, block_size: int, dtype: DTypeLike) -> KVPages:
        """Shapes of the layers behind the model's."""
        num_blocks += self.num_scratch_blocks(menu, block_size)
        return tuple(layer for kv in self.kvs for layer in kv_pages.page_shapes(kv, num_blocks, block_size, dtype))

    def speculation(self, limits: StepLimits, menu: BucketMenu, vocab_size: int, block_size: int) -> Speculation | None:
        if self.config is None:
            return None
        controller, following = _controller(self.config, limits), None
        if self.heads:
            following = Following(limits, controller, block_size=block_size, remembers=False)
        if self.drafter:
            most_levels = self.drafter.shape(menu).num_levels
            following = Following(limits, controller, block_size=block_size, most_levels=most_levels)
        return Speculation(
            self.heads.proposer() if self.heads else make_proposer(self.config, vocab_size),
            limits,
            controller,
            vocab_size=vocab_size,
            following=following,
        )


def _controller(config: SpeculativeConfig, limits: StepLimits) -> Controller | None:
    if config.num_speculative_tokens != "auto":
        return None
    if config.method != "lookahead":
        return Controller(limits)
    return Controller(limits, together=config.lookahead.num_drafts, steps_to_show=config.lookahead.ngram)


def open_drafting(config: SpeculativeConfig | None, lengths: Iterable[int], target: ModelFiles) -> Drafting:
    """What drafts for a model, as far as headers tell. lengths: how many drafts a sequence may have in a step.

    Raises:
        ModelNotFoundError, CheckpointError, ConfigError, UnsupportedError: it is not there, or does not fit.
    """
    if config is not None and config.acceptance == "typical":
        logger.warning("acceptance 'typical' is lossy: sampled texts do not follow the model's distribution")
    drafting = Drafting(config, open_heads(config, target.spec, max(lengths, default=0)), open_drafter(config, target))
    if config is not None and config.branches:
        _check_windows(config, target, (target.spec.kv, *drafting.kvs))
    return drafting


def _check_windows(config: SpeculativeConfig, target: ModelFiles, kvs: Iterable[KVSpec]) -> None:
    """Attention takes a tree or a sliding window, not both."""
    if all(window is None for kv in kvs for window in kv.sliding_windows):
        return
    branches_always = config.method == "lookahead"
    what, instead = ("method 'lookahead'", "a method of chains") if branches_always else ("tree=True", "tree=False")
    raise UnsupportedError(
        f"speculative_config: {what} is not supported for {target.directory}: its layers, or those of what drafts for it, have sliding "
        f"windows; use {instead}"
    )
