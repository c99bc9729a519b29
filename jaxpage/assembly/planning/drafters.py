"""Opens drafters that run on the device.

It knows the files that each kind of drafter has, and what each kind needs of an engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from flax import nnx
from jax.typing import DTypeLike

from jaxpage.assembly.planning.drafted_engine import DraftedEngine, DrafterFiles, tree_shape
from jaxpage.checkpoints import LoadPlan, ModelFiles, load_weights, open_model
from jaxpage.checkpoints.drafters import (
    EAGLE_FILES,
    MEDUSA_FILES,
    EagleMethod,
    MedusaFiles,
    is_assistant,
    load_assistant,
    load_eagle,
    load_medusa,
    load_mtp,
    open_assistant,
    open_eagle,
    open_medusa,
    open_mtp,
)
from jaxpage.checkpoints.finding import HUB_FILES, resolve_model
from jaxpage.checkpoints.tokenizers import open_tokenizer
from jaxpage.device import Packings
from jaxpage.device.drafters import (
    AssistantDrafter,
    Choice,
    HeadDrafter,
    ModelDrafter,
    TopIdsDrafter,
    TreeShape,
)
from jaxpage.device.inputs import BucketMenu
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.sharded import ShardedEmbedding
from jaxpage.layers.sharding import UNDIVIDED, Sharding
from jaxpage.models import KVSpec, abstract
from jaxpage.models.drafters import Assistant, DraftModel, MedusaHeads, MtpHead
from jaxpage.models.parameters import Path as LayerPath
from jaxpage.models.parameters import replace_modules
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.settings.speculative_methods import METHODS, DrafterKind
from jaxpage.shapes import MAX_DRAFTS
from jaxpage.speculation import NUM_RECYCLED, Choices, assume_accuracies, choices_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadFiles:
    """Holds Medusa's heads, and the tree of drafts that they make."""

    files: MedusaFiles
    choices: Choices
    kvs: ClassVar[tuple[KVSpec, ...]] = ()
    plan_in_model: ClassVar[LoadPlan | None] = None
    aux_layers: ClassVar[tuple[int, ...] | None] = None
    reads_target: ClassVar[bool] = False

    def depths(self, menu: BucketMenu) -> Sequence[int]:
        """Returns the one depth: the heads draft for all places at once."""
        return (MAX_DRAFTS,)

    @property
    def num_candidates(self) -> int:
        """Returns the number of candidates of each head that drafts use (W)."""
        return 1 + max(rank for path in self.choices for rank in path)

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of the heads' weights."""
        return self.files.num_bytes(dtype)

    def load(self, dtype: str, put: Callable[[Any], Any], *, progress: bool) -> Any:
        """Returns the heads' parameters, each one `put(array)`."""
        return load_medusa(self.files, dtype, put, progress=progress)

    def find_packings(self, engine: DraftedEngine) -> Packings:
        """Returns which of its weights this engine has in panels."""
        return engine.pack(self._module(engine))

    def make(self, engine: DraftedEngine) -> HeadDrafter:
        """Returns the drafter for this engine."""
        module = self._module(engine)
        engine.pack(module)
        return HeadDrafter(abstract(module)[0], self.num_candidates)

    def _module(self, engine: DraftedEngine) -> nnx.Module:
        return MedusaHeads(self.files.spec, dtype=engine.dtype)


@dataclass(frozen=True)
class NoFiles:
    """Makes drafts of the target's own most likely tokens; there are no files.

    Attributes:
        vocab_size: The number of the target's token ids (V).
    """

    vocab_size: int
    kvs: ClassVar[tuple[KVSpec, ...]] = ()
    plan_in_model: ClassVar[LoadPlan | None] = None
    aux_layers: ClassVar[tuple[int, ...] | None] = None
    reads_target: ClassVar[bool] = False

    def depths(self, menu: BucketMenu) -> Sequence[int]:
        """Returns no depths, since the most likely tokens are always taken."""
        return ()

    def num_bytes(self, dtype: str) -> int:
        """Returns 0, since there are no weights."""
        return 0

    def load(self, dtype: str, put: Callable[[Any], Any], *, progress: bool) -> None:
        """Returns None, since there are no weights."""
        return None

    def find_packings(self, engine: DraftedEngine) -> Packings:
        """Returns nothing, since there are no weights."""
        return {}

    def make(self, engine: DraftedEngine) -> TopIdsDrafter:
        """Returns the drafter for this engine."""
        return TopIdsDrafter(min(NUM_RECYCLED, self.vocab_size))


@dataclass(frozen=True)
class ModelDrafterFiles:
    """Holds a draft model or an EAGLE head.

    Attributes:
        kv: The KV cache of its layers.
        aux_layers: The target's layers whose hidden states it reads; see `models.drafters.Drafter`.
        module: Makes the module, a `models.drafters.Drafter`, for a dtype.
        num_bytes: Gives the bytes of its weights in a dtype.
        load: Loads its parameters.
        plan_in_model: The tensors that fill them, if they are in the model's checkpoint.
    """

    kv: KVSpec
    aux_layers: tuple[int, ...] | None
    module: Callable[[DTypeLike], nnx.Module]
    num_bytes: Callable[[str], int]
    load: Callable[..., dict[str, Any]]
    plan_in_model: LoadPlan | None = None
    reads_target: ClassVar[bool] = False

    @property
    def kvs(self) -> tuple[KVSpec, ...]:
        """Returns the KV cache of its own layers."""
        return (self.kv,)

    def depths(self, menu: BucketMenu) -> Sequence[int]:
        """Returns how many places ahead it can draft."""
        return range(1, 1 + tree_shape(menu).num_levels)

    def divide(self, dtype: str, sharding: Sharding = UNDIVIDED) -> nnx.Module:
        """Returns the module whose graph `models.drafters.join` takes.

        Args:
            dtype: The dtype of the model.
            sharding: The sharding of the target, whose embedding the drafter may use.
        """
        module = self.module(dtype)

        def divide(path: LayerPath, each: nnx.Module) -> nnx.Module | None:
            if isinstance(each, Embedding) and each.name is None:  # it is the target's embedding
                return ShardedEmbedding(each, sharding)
            return None

        if sharding.is_divided:
            replace_modules(module, divide)
        return module

    def find_packings(self, engine: DraftedEngine) -> Packings:
        """Returns which of its weights this engine has in panels."""
        return engine.pack(self.divide(engine.dtype, engine.sharding))

    def make(self, engine: DraftedEngine) -> ModelDrafter:
        """Returns the drafter for this engine."""
        shape = tree_shape(engine.menu)
        choice = _choice(engine, shape)
        # A drafter's layers come last.
        own_groups = engine.layer_groups[-self.kv.num_layers :]
        module = self.divide(engine.dtype, engine.sharding)
        engine.pack(module)
        return ModelDrafter(
            abstract(module)[0], self.aux_layers, own_groups, shape, engine.num_blocks, choice
        )


def _choice(engine: DraftedEngine, shape: TreeShape) -> Choice:
    """Returns how a drafter chooses its tokens under the acceptance rule of an engine."""
    # Drafts of a tree are not drawn: siblings would have to be drawn without replacement.
    if engine.acceptance == "rejection" and shape.num_branches == 1:
        return "drawn"
    return "coupled" if engine.acceptance == "coupled" else "top"


@dataclass(frozen=True)
class PlannedAssistant:
    """Holds an assistant of Gemma 4, which has no KV cache of its own.

    Attributes:
        module: Makes the module for a dtype.
        num_bytes: Gives the bytes of its weights in a dtype.
        load: Loads its parameters.
    """

    module: Callable[[DTypeLike], Assistant]
    num_bytes: Callable[[str], int]
    load: Callable[..., dict[str, Any]]
    kvs: ClassVar[tuple[KVSpec, ...]] = ()
    plan_in_model: ClassVar[LoadPlan | None] = None
    aux_layers: ClassVar[tuple[int, ...] | None] = None
    reads_target: ClassVar[bool] = True

    def depths(self, menu: BucketMenu) -> Sequence[int]:
        """Returns how many places ahead it can draft."""
        return range(1, 1 + tree_shape(menu).num_levels)

    def find_packings(self, engine: DraftedEngine) -> Packings:
        """Returns which of its weights this engine has in panels."""
        return engine.pack(self.module(engine.dtype))

    def make(self, engine: DraftedEngine) -> AssistantDrafter:
        """Returns the drafter for this engine."""
        shape = tree_shape(engine.menu)
        module = self.module(engine.dtype)
        engine.pack(module)
        graph = abstract(module)[0]
        return AssistantDrafter(graph, engine.layer_groups, shape, _choice(engine, shape))


def open_heads(config: SpeculativeConfig, target: ModelFiles) -> HeadFiles:
    """Opens Medusa's heads.

    Raises:
        ModelNotFoundError: There is no such directory.
        CheckpointError: The heads do not fit the target.
        ConfigError: The settings ask for more drafts than the heads can predict.
    """
    directory = drafter_directory(config)
    spec = target.spec
    files = open_medusa(directory, hidden_size=spec.hidden_size, vocab_size=spec.vocab_size)
    num_heads = files.spec.num_heads
    num_drafts = config.num_speculative_tokens
    accuracies = [
        row[: files.num_tokens] for row in files.accuracies or assume_accuracies(num_heads)
    ]
    choices = choices_of(
        config.medusa_choices, accuracies, max(config.draft_lengths), tree=config.tree
    )
    deepest = max(map(len, choices))
    if deepest > num_heads or (num_drafts != "auto" and len(choices) < num_drafts):
        requested = (
            f"medusa_choices goes {deepest} deep"
            if deepest > num_heads
            else f"num_speculative_tokens is {num_drafts}"
        )
        raise ConfigError(
            f"speculative_config: {requested}, but of the {num_heads} heads in {directory} each "
            "predicts one place, which gives "
            f"{len(choices)} drafts at most"
        )
    heads = HeadFiles(files, choices)
    if heads.num_candidates > files.num_tokens:
        raise ConfigError(
            f"speculative_config: medusa_choices asks for rank {heads.num_candidates}, of "
            f"{files.num_tokens} tokens in all"
        )
    return heads


def _open_eagle(config: SpeculativeConfig, target: ModelFiles) -> ModelDrafterFiles:
    directory = drafter_directory(config)
    files = open_eagle(directory, cast(EagleMethod, config.method), target)
    load = functools.partial(load_eagle, files)
    return ModelDrafterFiles(
        files.spec.decoder.kv, files.spec.aux_layers, files.spec.make, files.num_bytes, load
    )


def _open_mtp(config: SpeculativeConfig, target: ModelFiles) -> ModelDrafterFiles:
    files = open_mtp(target)
    load = functools.partial(load_mtp, files)
    kv = files.spec.of_draft_layer().kv
    return ModelDrafterFiles(
        kv, MtpHead.aux_layers, files.make, files.plan.num_bytes, load, files.plan
    )


def _open_assistant(directory: Path, target: ModelFiles) -> PlannedAssistant:
    files = open_assistant(directory, target)
    return PlannedAssistant(
        files.spec.make, files.num_bytes, functools.partial(load_assistant, files)
    )


def open_draft_model(
    config: SpeculativeConfig, target: ModelFiles
) -> ModelDrafterFiles | PlannedAssistant:
    """Opens a draft model, which has the target's vocabulary.

    It is a model of its own, or an assistant of Gemma 4.
    """
    directory = drafter_directory(config)
    if is_assistant(directory):
        return _open_assistant(directory, target)
    files = open_model(directory)
    positions = files.spec.max_position_embeddings
    needed = target.spec.max_position_embeddings
    if positions < needed:
        logger.warning(
            "the draft model's positions end at %d, the model's at %d: beyond that its drafts are "
            "poor",
            positions,
            needed,
        )
    if files.spec.vocab_size != target.spec.vocab_size:
        _check_padding(files, target)

    def read(dtype: str, put: Callable[[Any], Any], *, progress: bool) -> dict[str, Any]:
        return {"model": load_weights(files.plan, dtype, put, progress=progress)}

    return ModelDrafterFiles(
        files.spec.kv,
        None,
        lambda dtype: DraftModel(
            files.family, files.spec, files.rule, vocab_size=target.spec.vocab_size, dtype=dtype
        ),
        files.plan.num_bytes,
        read,
    )


def _check_padding(files: ModelFiles, target: ModelFiles) -> None:
    """Checks that two vocabularies differ in padding only, as those of one published family may.

    Raises:
        CheckpointError: They differ in more.
    """
    sizes = (files.spec.vocab_size, target.spec.vocab_size)
    tokenizers = [open_tokenizer(model.directory) for model in (files, target)]
    differ = (
        f"the draft model in {files.directory} has {sizes[0]} tokens, and the model has {sizes[1]}"
    )
    if None in tokenizers:
        raise CheckpointError(
            f"{differ}: without both tokenizers it cannot be told whether the rest is padding"
        )
    first, second = (
        {
            (token, token_id)
            for token, token_id in tokenizer.get_vocab().items()
            if token_id < min(sizes)
        }
        for tokenizer in tokenizers
        if tokenizer is not None
    )
    if first != second:
        token, token_id = min(first ^ second, key=lambda pair: pair[1])
        raise CheckpointError(
            f"{differ}, and only one of their tokenizers knows {token!r} as {token_id}"
        )


_HUB_FILES: Mapping[DrafterKind | None, Sequence[str]] = {
    "heads": MEDUSA_FILES,
    "eagle_head": EAGLE_FILES,
}


def drafter_directory(config: SpeculativeConfig) -> Path:
    """Returns the directory of a method that has weights of its own.

    Raises:
        ModelNotFoundError: There is no such model.
    """
    assert config.model is not None, "checked with the settings"
    return resolve_model(
        config.model, hub_files=_HUB_FILES.get(METHODS[config.method].drafter, HUB_FILES)
    )


_OPENERS: Mapping[DrafterKind, Callable[[SpeculativeConfig, ModelFiles], DrafterFiles]] = {
    "heads": open_heads,
    "eagle_head": _open_eagle,
    "mtp_head": _open_mtp,
    "model": open_draft_model,
    "top_ids": lambda config, target: NoFiles(target.spec.vocab_size),
}


def open_drafter(config: SpeculativeConfig, target: ModelFiles) -> DrafterFiles | None:
    """Returns the drafter, or None for a method that drafts on the host; reads headers only.

    Raises:
        ModelNotFoundError: There is no such drafter.
        CheckpointError: The drafter does not fit the target.
        ConfigError: The settings ask for more drafts than the drafter can predict.
        UnsupportedError: The drafter is of an unknown family.
    """
    kind = METHODS[config.method].drafter
    return None if kind is None else _OPENERS[kind](config, target)
