"""Computes a layer of a decoder: attention or a recurrence, then a feed-forward half."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.norms import add_and_norm, add_before_norm, keep_and_norm
from jaxpage.models.parts.norms import Norm


class Block(nnx.Module):
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`.

        x ──┬── attention_norm ── attention ── post_attention_norm ── (+) ──
            └──────────────────────────────────────────────────────────┘
          ──┬── mlp_norm ── mlp ── post_mlp_norm ── (+) ──
            └─────────────────────────────────────────┘

    Each norm may be None. In a parallel block both halves take x: the second one takes what the
    first one takes, unless it has a norm of its own.
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
        parallel: bool = False,
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
            parallel: True if both halves take the input of the block.
            residual_scale: The factor of each half's output, before it is added.
        """
        self.attention_norm = attention_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm
        self.parallel = parallel
        self.residual_scale = residual_scale

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        x_TD, normed_TD = keep_and_norm(self.attention_norm, x_TD)
        attended_TD, layer_pages = self.attention(normed_TD, layer_pages, context)
        attended_TD = self._scale(_apply(self.post_attention_norm, attended_TD))
        if self.parallel:
            added_TD = x_TD + attended_TD
            entering_TD = normed_TD if self.mlp_norm is None else self.mlp_norm(x_TD)
        else:
            added_TD, entering_TD = add_and_norm(self.mlp_norm, x_TD, attended_TD)
        fed_TD = _apply(self.post_mlp_norm, self.mlp(entering_TD))
        return add_before_norm(added_TD, self._scale(fed_TD)), layer_pages

    def _scale(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


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
