"""What every model family shows the rest of jaxpage: the protocols, and how a model is built without any memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.layers.attention import Attend, LayerPages
from jaxpage.models.weights import Weight

Pages = tuple[LayerPages, ...]  # one entry per layer
Hidden = Any  # (hidden states [T, D], pages); and a tuple of more hidden states where taps are named


@dataclass(frozen=True)
class KVSpec:
    """The keys and values that a sequence keeps per position: `num_layers * 2 * num_kv_heads * head_width` numbers.

    sliding_windows: per layer, how many positions it sees, the own included (see `Attend`); None sees all.
    """

    num_layers: int
    num_kv_heads: int
    head_width: int
    sliding_windows: tuple[int | None, ...]


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

    def __call__(
        self, token_ids_T: jax.Array, positions_T: jax.Array, pages: Pages, attend: Attend, taps: Sequence[int] = ()
    ) -> Hidden:
        """Hidden states [T, D] after the final norm, and the pages as `attend` left them.

        taps: with any, a third value follows: the hidden states [T, D] that enter the layers of these numbers, in their order.
        0 names what the first layer sees, the number of layers what leaves the last one, before the final norm.
        """

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Logits [B, V], float32."""


@runtime_checkable
class SpecFactory(Protocol):
    def from_config(self, config: Mapping[str, Any]) -> ModelSpec:
        """Read config.json. Raises CheckpointError for nonsense, UnsupportedError for what is not honoured."""


@runtime_checkable
class ModelFactory(Protocol):
    def __call__(self, spec: Any, *, dtype: DTypeLike) -> Model: ...


@runtime_checkable
class Family(Protocol):
    """What the module of a family must contain."""

    Spec: SpecFactory
    Model: ModelFactory
    ignored: tuple[str, ...]  # globs over names of checkpoint tensors that carry nothing; `weights` takes precedence

    def weights(self, spec: Any) -> list[Weight]:
        """One entry per parameter of the model."""


def run_layers(
    layers: Iterable[Callable[[jax.Array, LayerPages], tuple[jax.Array, LayerPages]]],
    norm: Callable[[jax.Array], jax.Array] | None,
    hidden_TD: jax.Array,
    pages: Pages,
    taps: Sequence[int],
) -> Hidden:
    """What a model returns (see `Model`), of layers one behind the other and a final norm."""
    entering, new_pages = [hidden_TD], []
    for layer, layer_pages in zip(layers, pages, strict=True):
        hidden_TD, layer_pages = layer(hidden_TD, layer_pages)
        entering.append(hidden_TD)
        new_pages.append(layer_pages)
    output = (hidden_TD if norm is None else norm(hidden_TD), tuple(new_pages))
    return (*output, tuple(entering[tap] for tap in taps)) if taps else output


def num_parameters(family: Family, spec: ModelSpec) -> int:
    """Numbers that the model's weights have in all."""
    _, parameters = abstract_model(family, spec, "float32")
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def abstract_model(family: Family, spec: ModelSpec, dtype: DTypeLike) -> tuple[Any, dict[str, Any]]:
    """The model's graph and its parameters as a nested dict of `jax.ShapeDtypeStruct`: nothing is allocated or drawn.

    Inside a jitted function, `nnx.merge(graph, parameters)` makes the model of such a dict filled with arrays.
    """
    return abstract(lambda: family.Model(spec, dtype=dtype))


def abstract(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """As `abstract_model`, of any module."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, nnx.to_pure_dict(state)
