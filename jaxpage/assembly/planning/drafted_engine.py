"""Describes an engine to its drafter, and the files of a drafter to the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flax import nnx

from jaxpage.checkpoints import LoadPlan
from jaxpage.device import Packings
from jaxpage.device.drafters import DeviceDrafter, TreeShape
from jaxpage.device.hardware import Backend
from jaxpage.device.inputs import BucketMenu
from jaxpage.layers.sharding import Sharding
from jaxpage.models import KVSpec

# EAGLE-2 grows trees of 60 drafts, 10 branches and depth 6 for the largest models. Smaller trees
# have fewer branches.
DEEPEST_TREE = 6
MAX_BRANCHES = 8


@dataclass(frozen=True)
class DraftedEngine:
    """Tells a drafter of the engine that it drafts for.

    Attributes:
        dtype: The type of weights and activations.
        sharding: The division of the target over devices.
        kernels: The kernel set; None if this machine lacks the device.
        menu: The shapes of the steps.
        layer_groups: The cache group of each layer, the target's layers first.
        num_blocks: The number of blocks on the device (P), for each cache group.
        acceptance: The name of the rule by which drafts are accepted.
    """

    dtype: str
    sharding: Sharding
    kernels: Backend | None
    menu: BucketMenu
    layer_groups: tuple[int, ...]
    num_blocks: tuple[int, ...]
    acceptance: str

    def pack(self, module: nnx.Module) -> Packings:
        """Puts layers with weights in panels into a module, where the kernels multiply by such.

        Returns:
            What `pack_modules` returns.
        """
        return {} if self.kernels is None else self.kernels.pack_modules(module)


class DrafterFiles(Protocol):
    """Holds a drafter that fits its target; only headers were read, and nothing is on a device."""

    @property
    def kvs(self) -> tuple[KVSpec, ...]:
        """Returns the KV caches of its own layers, which follow the target's in every block."""
        ...

    @property
    def plan_in_model(self) -> LoadPlan | None:
        """Returns the tensors of the model's checkpoint that fill its weights, if any do."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """Returns the target's layers whose hidden states it reads; None if it reads none."""
        ...

    @property
    def reads_target(self) -> bool:
        """Returns whether it reads the pages of the target."""
        ...

    def depths(self, menu: BucketMenu) -> Sequence[int]:
        """Returns the values of `StepPlan.draft_depth` to choose from.

        There are none if the drafter costs so little that it always runs.
        """
        ...

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of its own weights."""
        ...

    def load(self, dtype: str, put: Callable[[Any], Any], *, progress: bool) -> Any:
        """Returns its own parameters, each one `put(array)`."""
        ...

    def find_packings(self, engine: DraftedEngine) -> Packings:
        """Returns which of its weights this engine has in panels."""
        ...

    def make(self, engine: DraftedEngine) -> DeviceDrafter:
        """Returns the drafter for this engine."""
        ...


def tree_shape(menu: BucketMenu) -> TreeShape:
    """Returns how deep and wide a drafter drafts for these step shapes.

    It has one branch unless the shapes take trees.
    """
    max_drafts = max(bucket.max_query_len - 1 for bucket in menu.verify)
    max_rows = max(bucket.num_rows for bucket in menu.verify)
    if not any(bucket.trees for bucket in menu.verify):
        return TreeShape(max_drafts, 1, max_rows)
    return TreeShape(
        min(max_drafts, DEEPEST_TREE), min(MAX_BRANCHES, 1 + math.isqrt(max_drafts)), max_rows
    )
