"""What every model family shows the rest of jaxpage: the protocols, and how a model is built without any memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.layers.context import ForwardContext, LayerPages, StateSpec
from jaxpage.models.replacing import Rule, replace_modules
from jaxpage.models.weights import Weight, weights_of

Pages = tuple[LayerPages, ...]  # one entry per layer
Hidden = tuple[jax.Array, Pages, tuple[jax.Array, ...]]


@dataclass(frozen=True)
class KVSpec:
    """The keys and values that a sequence keeps per position: `num_layers * 2 * num_kv_heads * head_width` numbers, or half of it.

    sliding_windows: per layer, how many positions it sees, the own included (see `Attend`); None sees all.
    value_width: values are the first so many numbers of the keys, and are not kept apart (latents); None: as wide as keys, and kept.
    states: per layer, what a recurrent layer keeps in place of keys and values; None: it is none. Empty: no layer is.
    """

    num_layers: int
    num_kv_heads: int
    head_width: int
    sliding_windows: tuple[int | None, ...]
    value_width: int | None = None
    states: tuple[StateSpec | None, ...] = ()

    def state_of(self, layer: int) -> StateSpec | None:
        return self.states[layer] if self.states else None


@runtime_checkable
class ModelSpec(Protocol):
    """What config.json says of a model: a frozen, hashable dataclass, made by the family's `Spec.from_config`."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits and rows of the token table: valid token ids are below it."""

    @property
    def model_width(self) -> int: ...

    @property
    def num_query_heads(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence, prompt and output together, that the model computes as its authors meant."""

    @property
    def kv(self) -> KVSpec: ...

    @property
    def tie_word_embeddings(self) -> bool: ...


@runtime_checkable
class Model(Protocol):
    """A family's module: a flat stream of tokens in, hidden states out; logits only for the rows that are sampled."""

    def __call__(self, token_ids_T: jax.Array, pages: Pages, context: ForwardContext) -> Hidden:
        """Hidden states [T, D] after the final norm, the pages as `attend` left them, and auxiliary hidden states.

        These are, for each layer number in `context.aux_layers`, what enters that layer [T, D]: 0 names what the first layer
        sees, the number of layers what leaves the last one, before the final norm.
        """

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Logits [B, V], float32."""


@runtime_checkable
class SpecFactory(Protocol):
    def from_config(self, config: Mapping[str, Any]) -> ModelSpec:
        """Reads config.json.

        Raises:
            CheckpointError: a field makes no sense.
            UnsupportedError: what a field asks for is not honoured.
            ExceptionGroup: several fields are wrong; it has an error of these kinds for each.
        """


@runtime_checkable
class ModelFactory(Protocol):
    def __call__(self, spec: Any, *, dtype: DTypeLike) -> Model: ...


@runtime_checkable
class Family(Protocol):
    """What the module of a family must contain.

    A family whose hidden states overflow float16 has `OVERFLOWS_FLOAT16 = True`, too (those that vLLM refuses float16).
    """

    Spec: SpecFactory
    Model: ModelFactory
    prefix: str  # of names in the checkpoint; see `weights_of`
    ignored: tuple[str, ...]  # globs over names of checkpoint tensors that carry nothing


def run_layers(
    layers: Iterable[
        Callable[[jax.Array, LayerPages, ForwardContext], tuple[jax.Array, LayerPages]]
    ],
    norm: Callable[[jax.Array], jax.Array] | None,
    hidden_TD: jax.Array,
    pages: Pages,
    context: ForwardContext,
) -> Hidden:
    """What a model returns (see `Model`), of layers one behind the other and a final norm."""
    entering, new_pages = [hidden_TD], []
    for layer, layer_pages in zip(layers, pages, strict=True):
        hidden_TD, layer_pages = layer(hidden_TD, layer_pages, context)
        entering.append(hidden_TD)
        new_pages.append(layer_pages)
    output_TD = hidden_TD if norm is None else norm(hidden_TD)
    return output_TD, tuple(new_pages), tuple(entering[index] for index in context.aux_layers)


def model_weights(family: Family, spec: ModelSpec, rule: Rule | None = None) -> list[Weight]:
    """Every parameter of the model, with where it stands in a checkpoint. rule: of modules that replace the family's."""
    return weights_of(make_model(family, spec, "float32", rule), family.prefix)


def ignored_tensors(family: Family, spec: ModelSpec) -> tuple[str, ...]:
    """Returns globs over names of tensors that a checkpoint of this model may have, and that are not loaded."""
    last = spec.kv.num_layers
    draft_layers = range(last, last + getattr(spec, "num_draft_layers", 0))
    drafting = [
        f"{prefix}layers.{index}.*" for index in draft_layers for prefix in ("", family.prefix)
    ]
    return (*family.ignored, *drafting)


def abstract_model(
    family: Family, spec: ModelSpec, dtype: DTypeLike, rule: Rule | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model's graph and its parameters as a nested dict of `jax.ShapeDtypeStruct`: nothing is allocated or drawn.

    Inside a jitted function, `nnx.merge(graph, parameters)` makes the model of such a dict filled with arrays.
    """
    return abstract(make_model(family, spec, dtype, rule))


def abstract(module: nnx.Module) -> tuple[Any, dict[str, Any]]:
    """As `abstract_model`, of any module. What its parameters say of checkpoints is left out: it is no part of what is compiled."""
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata(sources=())
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


def make_model(family: Family, spec: ModelSpec, dtype: DTypeLike, rule: Rule | None) -> Any:
    """The module, which is a `Model`. rule: of modules that replace the family's."""
    model = cast(nnx.Module, family.Model(spec, dtype=dtype))
    if rule is not None:
        replace_modules(model, rule)
    return model
