"""Computes a decoder: a token table, blocks, a final norm and a head.

A block has attention or a recurrence, then a feed-forward half; a half block has one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Embedding, ForwardContext, LayerPages
from jaxpage.layers.embedding import token_tables
from jaxpage.layers.feeding import add_and_feed
from jaxpage.layers.norms import add_and_norm, add_before_norm, keep_and_norm, norm_of_sum
from jaxpage.models.base import FamilyModule, Hidden, Pages, run_layers
from jaxpage.models.parts.names import ModuleNames, Scope
from jaxpage.models.parts.norms import Norm, rms_norm


class Block(nnx.Module):
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`.

        x ──┬── attention_norm ── attention ── post_attention_norm ── (+) ──
            └──────────────────────────────────────────────────────────┘
          ──┬── mlp_norm ── mlp ── post_mlp_norm ── (+) ──
            └─────────────────────────────────────────┘

    Kernels compute several of these in one call, which find in `layers.producers` what came before.
    Each norm may be None. If `is_parallel` is True, both halves take x: the second one takes what
    the first one takes, unless it has a norm of its own.
    """

    def __init__(
        self,
        *,
        attention_norm: Norm | None,
        attention: Any,
        post_attention_norm: Norm | None = None,
        mlp_norm: Norm | None,
        mlp: Any,
        post_mlp_norm: Norm | None = None,
        is_parallel: bool = False,
        residual_scale: float = 1.0,
    ):
        """Makes the block.

        Args:
            attention_norm: The norm before attention.
            attention: The attention, or a recurrent layer.
            post_attention_norm: The norm of the output of attention.
            mlp_norm: The norm before the feed-forward half.
            mlp: The feed-forward half, or experts.
            post_mlp_norm: The norm of its output.
            is_parallel: True if both halves take the input of the block.
            residual_scale: The factor of each half's output, before it is added.
        """
        self.attention_norm = attention_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm
        self.is_parallel = is_parallel
        self.residual_scale = residual_scale

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        x_TD, normed_TD = keep_and_norm(self.attention_norm, x_TD)
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        attended_TD = self._scale(_apply(self.post_attention_norm, attended_TD))
        if not self.is_parallel and self.post_mlp_norm is None:
            factor = self.residual_scale
            output_TD = add_and_feed(self.mlp_norm, self.mlp, x_TD, attended_TD, factor)
            if output_TD is not None:
                return output_TD, layer_pages
        if self.is_parallel:
            added_TD = x_TD + attended_TD
            entering_TD = normed_TD if self.mlp_norm is None else self.mlp_norm(x_TD)
        else:
            added_TD, entering_TD = add_and_norm(self.mlp_norm, x_TD, attended_TD)
        fed_TD = _apply(self.post_mlp_norm, self.mlp(entering_TD))
        return add_before_norm(added_TD, self._scale(fed_TD)), layer_pages

    def _scale(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


class PostNormBlock(nnx.Module):
    """Computes `y = norm(x + attention(x))`, then `norm(y + mlp(y))` (Vaswani et al., 2017)."""

    def __init__(self, *, attention_norm: Norm, attention: Any, mlp_norm: Norm, mlp: Any):
        """Makes the block of its halves and of the norms of their sums with the input."""
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages; see `Block`."""
        attended_TD, layer_pages = self.attention(x_TD, layer_pages, context)
        y_TD = norm_of_sum(self.attention_norm, x_TD, attended_TD)
        return norm_of_sum(self.mlp_norm, y_TD, self.mlp(y_TD)), layer_pages


class HalfBlock(nnx.Module):
    """Computes `x + mixer(norm(x))`, in a decoder whose layers have one half each."""

    def __init__(self, norm: Norm, mixer: Any, *, has_pages: bool = True):
        """Makes the block.

        Args:
            norm: The norm before the half.
            mixer: Attention, a recurrent layer, or a feed-forward half.
            has_pages: False if it is a feed-forward half, to which the pages of a layer are empty.
        """
        self.norm = norm
        self.mixer = mixer
        self.has_pages = has_pages

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: Any, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], Any]:
        """Returns the output of the layer and its pages."""
        x_TD, normed_TD = keep_and_norm(self.norm, x_TD)
        if not self.has_pages:
            return add_before_norm(x_TD, self.mixer(normed_TD)), layer_pages
        mixed_TD, layer_pages = self.mixer(normed_TD, layer_pages, context)
        return add_before_norm(x_TD, mixed_TD), layer_pages


def _apply(norm: Norm | None, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x_TD if norm is None else norm(x_TD)


def cap_logits(logits_BV: jax.Array, cap: float | None) -> jax.Array:
    """Returns logits with a soft cap; None is no cap."""
    return logits_BV if cap is None else cap * jnp.tanh(logits_BV / cap)


class Decoder(FamilyModule):
    """Computes a decoder; see `models.base.Model`.

    A family makes its block, and overrides what else differs:

        class Granite(Decoder, config=GraniteConfig): ...
    """

    ignored: ClassVar[tuple[str, ...]] = ("*rotary_emb.inv_freq",)
    OVERFLOWS_FLOAT16: ClassVar[bool] = False
    names: ClassVar[ModuleNames] = ModuleNames()
    # Returns a norm of hidden states, of the kind that the family has, of a config and a scope.
    make_norm: ClassVar[Callable[..., Norm]] = staticmethod(rms_norm)
    # True if vectors may take the place of tokens. In a family with a `__call__` of its own it is
    # False unless the family says otherwise.
    takes_vectors: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes the class a family; see `FamilyModule`."""
        super().__init_subclass__(**options)
        if "__call__" in cls.__dict__ and "takes_vectors" not in cls.__dict__:
            cls.takes_vectors = False

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        names = self.names
        at = Scope(config.name, dtype)
        self.config = config
        self.tokens, self.head = token_tables(
            config.vocab_size,
            config.hidden_size,
            name=(at / names.tokens).name,
            heads=names.heads,
            tied=config.tie_word_embeddings,
            bias=self.has_head_bias(config),
            dtype=dtype,
        )
        self.positions = self.make_positions(config, at)
        self.layers = nnx.List(
            self.make_block(config, index, at / f"{names.layers}.{index}")
            for index in range(config.num_layers)
        )
        self.norm: Any = self.make_norm(config, at / names.norm)
        self.make_others(config, at)

    def make_others(self, config: Any, at: Scope) -> None:
        """Makes the modules that the family has beside those of all decoders.

        Args:
            config: The config of the model.
            at: The scope of the decoder.
        """

    @classmethod
    @abstractmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer.

        Args:
            config: The config of the model.
            index: The number of the layer.
            layer: The scope of the layer.
        """

    @classmethod
    def make_positions(cls, config: Any, at: Scope, *, padding: int = 0) -> Embedding | None:
        """Returns the table of learned positions; None if there is none.

        Args:
            config: The config of the model.
            at: The scope of the decoder.
            padding: The number of rows before those of positions.
        """
        if cls.names.positions is None:
            return None
        return Embedding(
            config.max_position_embeddings + padding,
            config.hidden_size,
            name=(at / cls.names.positions).name,
            axis=None,
            dtype=at.dtype,
        )

    @classmethod
    def has_head_bias(cls, config: Any) -> bool:
        """Returns whether logits have biases."""
        return False

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        hidden_TD = self.embed(token_ids_T, context)
        layers = self.bind_layers(token_ids_T, hidden_TD, context)
        places = self.config.layer_places
        return run_layers(layers, self.norm, hidden_TD, pages, context, places)

    def bind_layers(
        self, token_ids_T: Int[Array, "T"], hidden_TD: Float[Array, "T D"], context: ForwardContext
    ) -> Iterable[Any]:
        """Returns the layers, each with what it takes from a step beside states and pages.

        Args:
            token_ids_T: The tokens.
            hidden_TD: The input of the first layer.
            context: The context.
        """
        return self.layers

    def embed(self, token_ids_T: Int[Array, "T"], context: ForwardContext) -> Float[Array, "T D"]:
        """Returns the input of the first layer; vectors take the place of some tokens."""
        embedded_TD = context.place_vectors(self.embed_tokens(token_ids_T))
        return self.enter(embedded_TD, context.positions_T)

    def embed_tokens(self, token_ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Returns what vectors may take the place of: the `inputs_embeds` of transformers."""
        return self.tokens(token_ids_T)

    def enter(
        self, embedded_TD: Float[Array, "T D"], positions_T: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Returns the input of the first layer, made of embedded tokens."""
        return embedded_TD if self.positions is None else embedded_TD + self.positions(positions_T)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        return (self.head or self.tokens).logits(hidden_BD)
