"""Opens a model's drafter, gives it memory, and makes the speculator of the scheduler."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.typing import DTypeLike

from jaxpage import speculation
from jaxpage.assembly.planning.drafted_engine import DraftedEngine, DrafterFiles, tree_shape
from jaxpage.checkpoints import LoadPlan, ModelFiles
from jaxpage.device import Packings
from jaxpage.device.inputs import BucketMenu
from jaxpage.device.pages import KVPages, page_shapes
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.sharding import Sharding
from jaxpage.models import KVSpec
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.settings.speculative_methods import AUTO
from jaxpage.speculation import NoSpeculation, Speculator
from jaxpage.step.limits import StepLimits
from jaxpage.step.strategy import Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafting:
    """Holds the drafter of an engine; without speculation both fields are None.

    Nothing is on a device before `load`.

    Attributes:
        config: The settings of speculation.
        drafter: The drafter on the device; None for a method that drafts on the host.
    """

    config: SpeculativeConfig | None = None
    drafter: DrafterFiles | None = None

    @property
    def kvs(self) -> tuple[KVSpec, ...]:
        """Returns the KV caches of the drafter's layers; they follow the model's in every block."""
        return self.drafter.kvs if self.drafter else ()

    @property
    def num_layers(self) -> int:
        """Returns the number of the drafter's layers that have a KV cache."""
        return sum(kv.num_layers for kv in self.kvs)

    @property
    def num_following(self) -> int:
        """Returns `PrefixIndex.num_following`: 1 if the drafter takes hidden states."""
        return int(self.drafter is not None and self.drafter.aux_layers is not None)

    @property
    def may_be_off(self) -> bool:
        """Returns whether some steps may run without the drafter on the device."""
        return (
            self.drafter is not None
            and self.config is not None
            and self.config.num_speculative_tokens == "auto"
        )

    @property
    def plan_in_model(self) -> LoadPlan | None:
        """Returns the tensors of the model's checkpoint that fill the drafter's weights."""
        return self.drafter.plan_in_model if self.drafter else None

    def with_weights_of(self, target: ModelFiles) -> Drafting:
        """Returns the same drafter for other weights of the model, whose checkpoint may have it.

        Raises:
            CheckpointError: The checkpoint has no such weights.
            UnsupportedError: The drafter's weights cannot be read from it.
        """
        if self.config is None or self.plan_in_model is None:
            return self
        return replace(self, drafter=_open_drafter(self.config, target))

    def check_sharding(self, sharding: Sharding) -> None:
        """Checks that the drafter can draft for a target that is divided like this.

        Raises:
            UnsupportedError: It reads the pages of the target, and they are divided.
        """
        if self.drafter is not None and self.drafter.reads_target and sharding.is_divided:
            raise UnsupportedError(
                "speculative_config.model is an assistant of Gemma 4, which reads the keys and "
                f"values of a whole model, and this one is divided into {sharding.num_shards} "
                "shards: set tensor_parallel_size to 1 and tensor_parallel_reduction to fast, or "
                "use another method"
            )

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of the drafter's weights."""
        return self.drafter.num_bytes(dtype) if self.drafter else 0

    def num_scratch_blocks(self, menu: BucketMenu, block_size: int) -> int:
        """Returns how many blocks each layer of a drafter has in addition to the pool's."""
        return tree_shape(menu).num_scratch_blocks(block_size) if self.kvs else 0

    def load(self, dtype: str, put: Callable[[Any], Any], *, progress: bool) -> Any:
        """Returns the drafter's parameters, each one `put(array)`, or None without a drafter."""
        return self.drafter.load(dtype, put, progress=progress) if self.drafter else None

    def find_packings(self, engine: DraftedEngine) -> Packings:
        """Returns which of the drafter's weights the engine has in panels."""
        return self.drafter.find_packings(engine) if self.drafter else {}

    def pages(
        self,
        menu: BucketMenu,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: DTypeLike,
        *,
        interleaved: bool = False,
    ) -> KVPages:
        """Returns the shapes of the pages of the drafter's layers.

        Args:
            menu: The shapes of the steps.
            num_blocks: The number of blocks of each layer's pool (P).
            block_size: The slots of a block (S).
            dtype: The type of the pages.
            interleaved: See `page_shapes`.
        """
        counts = iter([count + self.num_scratch_blocks(menu, block_size) for count in num_blocks])
        return tuple(
            layer
            for kv in self.kvs
            for layer in page_shapes(
                kv,
                [*itertools.islice(counts, kv.num_layers)],
                block_size,
                dtype,
                interleaved=interleaved,
            )
        )

    def speculator(
        self,
        limits: StepLimits,
        menu: BucketMenu,
        *,
        vocab_size: int,
        block_size: int,
        strategies: Mapping[int, Strategy],
    ) -> Speculator:
        """Returns the speculator, which proposes drafts to the scheduler.

        Args:
            limits: The limits of a step.
            menu: The shapes of the steps.
            vocab_size: The number of the model's token ids (V).
            block_size: The slots of a block (S).
            strategies: The decoding strategies by sequence id.
        """
        if self.config is None:
            return NoSpeculation()
        proposer = speculation.make_proposer(
            self.config, speculation.DraftedModel(vocab_size, getattr(self.drafter, "choices", ()))
        )
        controller = sync = None
        has_kv = bool(self.kvs)
        depths = self.drafter.depths(menu) if self.drafter else ()
        if self.config.num_speculative_tokens == "auto":
            unit = proposer.num_together
            warm_up = proposer.warm_up_steps
            controller = speculation.Controller(limits, unit=unit, warm_up=warm_up, depths=depths)
        if depths:
            sync = speculation.DrafterSync(limits, controller, block_size=block_size, has_kv=has_kv)
        return speculation.ProposingSpeculator(
            proposer,
            limits,
            controller,
            vocab_size=vocab_size,
            strategies=strategies,
            sync=sync,
            always_drafts=self.drafter is not None and not depths,
        )


def open_drafting(config: SpeculativeConfig | None, target: ModelFiles) -> Drafting:
    """Opens the drafter of a model; reads headers only.

    Raises:
        ModelNotFoundError: There is no such drafter.
        CheckpointError: The drafter does not fit the target.
        ConfigError: The settings ask for more drafts than the drafter can predict.
        UnsupportedError: The drafter is of an unknown family.
    """
    if config is None:
        return Drafting()
    if config.acceptance == "typical":
        logger.warning(
            "acceptance 'typical' is lossy: sampled texts do not follow the model's distribution"
        )
    if config.method == "auto":
        return _open_auto(config, target)
    return Drafting(config, _open_drafter(config, target))


def _open_drafter(config: SpeculativeConfig, target: ModelFiles) -> DrafterFiles | None:
    from jaxpage.assembly.planning.drafters import open_drafter

    return open_drafter(config, target)


def _open_auto(config: SpeculativeConfig, target: ModelFiles) -> Drafting:
    """Returns the first method of `AUTO` that the checkpoint has the weights for."""
    *tried, last = AUTO
    reasons = []
    for method in tried:
        chosen = config.model_copy(update={"method": method})
        try:
            drafting = Drafting(chosen, _open_drafter(chosen, target))
        except (CheckpointError, UnsupportedError) as error:
            reasons.append(str(error))
        else:
            logger.info("speculative_config: method 'auto' is %r", method)
            return drafting
    logger.info("speculative_config: method 'auto' is %r: %s", last, "; ".join(reasons))
    chosen = config.model_copy(update={"method": last})
    return Drafting(chosen, _open_drafter(chosen, target))
