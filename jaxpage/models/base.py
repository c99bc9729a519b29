"""Defines the protocols of model families, and builds a model without allocating any memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import jax
from flax import nnx

from jaxpage.layers import ForwardContext, LayerPages
from jaxpage.layers.context import StateSpec
from jaxpage.layers.norms import keep_and_norm
from jaxpage.models.parameters.replacing import Rule, replace_modules
from jaxpage.models.parameters.weights import Weight, weights_of

Pages = tuple[LayerPages, ...]  # One entry for each layer.
Hidden = tuple[jax.Array, Pages, tuple[jax.Array, ...]]


@dataclass(frozen=True)
class KVSpec:
    """Describes what a sequence keeps for each position: keys and values, or a state.

    Attributes:
        num_layers: The number of layers that keep something; others may read what these keep.
        num_kv_heads: The number of key/value heads.
        head_dim: The width of a head.
        sliding_windows: For each layer, how many positions a token sees, its own included (see
            `Attend`); None if it sees all.
        value_width: The number of leading numbers of a key that are its value, which is then not
            kept apart (latents); None if values are kept, as wide as keys.
        states: For each layer, the state that a recurrent layer keeps in place of keys and values;
            None for other layers. Empty if no layer is recurrent.
        decoder_layers: The number of layers of the decoder, where some have two of these layers
            (Falcon-H1), none (Nemotron-H) or those of another one (Gemma 4); None if it is
            `num_layers`.
        heads: For each layer, its number of key/value heads and their width, in a model whose
            layers differ in them; empty if all have `num_kv_heads` of `head_dim`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]
    value_width: int | None = None
    states: tuple[StateSpec | None, ...] = ()
    decoder_layers: int | None = None
    heads: tuple[tuple[int, int], ...] = ()

    @property
    def num_decoder_layers(self) -> int:
        """Returns the number of layers of the decoder."""
        return self.decoder_layers or self.num_layers

    def state_of(self, layer: int) -> StateSpec | None:
        """Returns the state of a layer; None if it keeps keys and values."""
        return self.states[layer] if self.states else None

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Returns the number of key/value heads of a layer, and their width."""
        return self.heads[layer] if self.heads else (self.num_kv_heads, self.head_dim)


@runtime_checkable
class ModelSpec(Protocol):
    """Holds what config.json says of a model: a frozen, hashable dataclass.

    `Spec.from_config` of the family makes it.
    """

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids, which is the width of the logits."""

    @property
    def hidden_size(self) -> int:
        """Returns the width of the hidden states (D)."""
        ...

    @property
    def num_query_heads(self) -> int:
        """Returns the number of query heads (N)."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Returns how many tokens, prompt and output, the longest sequence may have."""

    @property
    def kv(self) -> KVSpec:
        """Returns the description of what a sequence keeps for each position."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Returns whether the token table is the head too."""
        ...


@runtime_checkable
class Model(Protocol):
    """The module of a family, which takes a flat stream of tokens and returns hidden states.

    Logits are computed only for the rows that are sampled.
    """

    def __call__(self, token_ids_T: jax.Array, pages: Pages, context: ForwardContext) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states.

        The hidden states [T, D] come after the final norm, and the pages are those that `attend`
        returned. For each number in `context.aux_layers` there is an auxiliary hidden state [T, D],
        the input of the layer with this number. The number of layers selects the output of the last
        one, before the final norm.
        """

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits [B, V] in float32."""


@runtime_checkable
class SpecFactory(Protocol):
    """Makes the spec of a model from its config."""

    def from_config(self, config: Mapping[str, Any]) -> ModelSpec:
        """Reads config.json.

        Raises:
            CheckpointError: A field makes no sense.
            UnsupportedError: A field asks for something that is not supported.
            ExceptionGroup: Several fields are wrong; it has an error of these kinds for each.
        """


@runtime_checkable
class ModelFactory(Protocol):
    """Makes the module of a model from its spec."""

    def __call__(self, spec: Any, *, dtype: jax.typing.DTypeLike) -> Model:
        """Returns the module, whose parameters have this type."""
        ...


@runtime_checkable
class Family(Protocol):
    """Describes what the module of a family must contain.

    A family whose hidden states overflow float16 also has `OVERFLOWS_FLOAT16 = True` (those for
    which vLLM refuses float16).
    """

    Spec: SpecFactory
    Model: ModelFactory
    prefix: str | tuple[str, ...]  # the prefix of names in the checkpoint; see `other_names`
    ignored: tuple[str, ...]  # globs over names of checkpoint tensors that carry nothing


class FamilyModule(nnx.Module):
    """Is a model whose class is its family, too; see `Family`.

        class Granite(Decoder, config=GraniteConfig): ...

    The first line of the docstring stands in the list of models. For `older_names` and `renamed`
    see `other_names`.
    """

    Spec: ClassVar[Any]
    Model: ClassVar[Any]
    prefix: ClassVar[str | tuple[str, ...]] = "model."
    ignored: ClassVar[tuple[str, ...]] = ()
    older_names: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    renamed: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, config: type[Any] | None = None, **options: Any) -> None:
        """Makes the class a family: its model is the class itself, its spec a config."""
        super().__init_subclass__(**options)
        cls.Model = cls
        if config is not None:
            cls.Spec = config


def run_layers(
    layers: Iterable[
        Callable[[jax.Array, LayerPages, ForwardContext], tuple[jax.Array, LayerPages]]
    ],
    norm: Callable[[jax.Array], jax.Array] | None,
    hidden_TD: jax.Array,
    pages: Pages,
    context: ForwardContext,
    places: Sequence[int | tuple[int, ...]] | None = None,
) -> Hidden:
    """Runs layers and a final norm, and returns what `Model.__call__` returns.

    Args:
        layers: The layers.
        norm: The norm; None if there is none.
        hidden_TD: The input of the first layer.
        pages: The pages of all layers that keep something.
        context: The context.
        places: For each layer, the place of its pages, which layers may share. A layer with several
            places takes and returns the pages of all of them as a tuple; those without any have an
            empty one. None if each layer has one place of its own.
    """
    entering = [hidden_TD]
    new_pages = list(pages)
    deep_nTD = () if context.deep_nTD is None else context.deep_nTD
    for number, (layer, place) in enumerate(zip(layers, places or range(len(pages)), strict=True)):
        if isinstance(place, int):
            hidden_TD, new_pages[place] = layer(hidden_TD, new_pages[place], context)
        else:
            of_layer: Any = tuple(new_pages[each] for each in place)
            hidden_TD, of_layer = layer(hidden_TD, of_layer, context)
            for each, layer_pages in zip(place, of_layer, strict=True):
                new_pages[each] = layer_pages
        if number < len(deep_nTD):
            # DeepStack: features of a picture join after the layer, and the next one sees them.
            hidden_TD = hidden_TD + deep_nTD[number].astype(hidden_TD.dtype)
        entering.append(hidden_TD)
    output_TD = keep_and_norm(norm, hidden_TD)[1]
    return output_TD, tuple(new_pages), tuple(entering[index] for index in context.aux_layers)


def model_weights(family: Family, spec: Any, rule: Rule | None = None) -> list[Weight]:
    """Returns every parameter of the model, with its tensors in a checkpoint.

    Args:
        family: The model's family.
        spec: The spec of the model, or of its encoder of pictures.
        rule: Gives the modules that replace those of the family; None if none are replaced.
    """
    module = make_model(family, spec, "float32", rule)
    return weights_of(module, functools.partial(other_names, family, spec=spec))


def other_names(family: Family, name: str, spec: Any = None) -> tuple[str, ...]:
    """Returns the other names that a tensor, or a module, may have in a checkpoint of the family.

    Files that were saved from the headless model lack the prefix. Several prefixes are those that
    files may have, the modules' first. A family may have `older_names`: beginnings of names, each
    with those that older files have in its place. It may have `renamed`: parts of names, each with
    the part that other files have in its place. A spec may have `tied_names`: beginnings of names
    of modules that several layers share, each with those that the other layers give them.
    """
    prefixes = (family.prefix,) if isinstance(family.prefix, str) else family.prefix
    prefix, *other_prefixes = prefixes
    stem = name.removeprefix(prefix)
    names = [stem, *(other + stem for other in other_prefixes)] if name.startswith(prefix) else []
    pairs = (*getattr(family, "older_names", ()), *getattr(spec, "tied_names", ()))
    for beginning, other_beginnings in pairs:
        if name.startswith(beginning):
            names += [other + name.removeprefix(beginning) for other in other_beginnings]
    for part, other in getattr(family, "renamed", {}).items():
        names += [each.replace(part, other) for each in (name, *names) if part in each]
    return tuple(names)


def find_ignored_tensors(family: Family, spec: ModelSpec) -> tuple[str, ...]:
    """Returns globs over names of tensors that a checkpoint may have, and that are not loaded."""
    heads = getattr(spec, "draft_heads", None)
    head_globs = () if heads is None else heads.globs
    return (*family.ignored, *head_globs, *getattr(spec, "idle_tensors", ()))


def abstract_model(
    family: Family, spec: Any, dtype: jax.typing.DTypeLike, rule: Rule | None = None
) -> tuple[Any, dict[str, Any]]:
    """Returns the model's graph, and its parameters as a nested dict of `jax.ShapeDtypeStruct`.

    Nothing is allocated or drawn. In a jitted function `nnx.merge(graph, parameters)` makes the
    model of such a dict with arrays in it.
    """
    return abstract(make_model(family, spec, dtype, rule))


def abstract(module: nnx.Module) -> tuple[Any, dict[str, Any]]:
    """Returns the graph and the parameters of any module, as `abstract_model` does.

    The sources of its parameters are left out, because they are no part of what is compiled.
    """
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata(sources=())
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


def make_model(family: Family, spec: Any, dtype: jax.typing.DTypeLike, rule: Rule | None) -> Any:
    """Returns the module, which is a `Model`.

    Args:
        family: The model's family.
        spec: The spec of the model, or of its encoder of pictures.
        dtype: The type of its parameters.
        rule: Gives the modules that replace those of the family; None if none are replaced.
    """
    model = cast(nnx.Module, family.Model(spec, dtype=dtype))
    if rule is not None:
        replace_modules(model, rule)
    return model
