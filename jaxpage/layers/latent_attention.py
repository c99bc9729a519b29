"""Multi-head latent attention keeps one latent per token in place of all keys and values.

See DeepSeek-AI, 2024. Keys and values of the heads are never made. The product that would make a
head's keys from the latent is applied to its queries, and the one that would make its values is
applied to the output of attention (absorption). So attention sees one key/value head: its key is
the latent and a rotated part that all heads share, and its value is the latent alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers.attention import Scores, scale_by_position
from jaxpage.layers.context import AttentionOptions, ForwardContext, LayerPages
from jaxpage.layers.linear import Linear
from jaxpage.layers.matmul import matmul_by_head, weight_numbers
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.rope import Rope


@dataclass(frozen=True)
class LatentWidths:
    """Holds the widths of latent attention.

    Attributes:
        rank: The width of the latent.
        rotated: The width of the part of keys that is rotated and shared by all heads.
        plain: The width of the rest of a head's keys, as they would be made.
        value: The width of a head's values, as they would be made.
        query_rank: The width of the latent of queries; None if queries have none.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int | None

    @property
    def cached(self) -> int:
        """Returns how many numbers the cache has of a token."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Returns the width of a head's query."""
        return self.plain + self.rotated


class LatentQueries(nnx.Module):
    """Computes queries through a latent of their own: `up(norm(down(x)))`."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear):
        self.down = down
        self.norm = norm
        self.up = up

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T Q"]:
        """Returns the queries of all heads."""
        return self.up(self.norm(self.down(x_TD)))


@dataclass(frozen=True)
class LatentProjections:
    """Holds the products of latent attention, and the norm between them.

    Attributes:
        queries: The product for the queries of all heads, in each head the plain part first.
        down: The product for the latent and the part that is rotated.
        norm: The norm of the latent.
        expand: The product that would make each head's keys and values from the latent. Where its
            weight is quantised, each step dequantises it for as long as the layer needs it.
        output: The product for the output.
    """

    queries: Linear | LatentQueries
    down: Linear
    norm: RMSNorm
    expand: Linear
    output: Linear


class LatentAttention(nnx.Module):
    """Attends to the latents of all tokens.

    The module has the attributes of the projections that it is made of.
    """

    def __init__(
        self,
        layer_index: int,
        projections: LatentProjections,
        widths: LatentWidths,
        *,
        num_heads: int,
        rope: Rope | None,
        scores: Scores,
    ):
        """Makes the layer.

        Args:
            layer_index: The layer of the cache whose pages it reads; see `Attend`.
            projections: The products.
            widths: The widths of the heads and of the latent.
            num_heads: The number of heads.
            rope: The rotation; None if there is none.
            scores: Its scale and its temperature tuning, which are all that this attention has.
        """
        self.layer_index = layer_index
        self.num_heads = num_heads
        self.widths = widths
        self.rope = rope
        # By the width of the queries before absorption: the scores are the same numbers after it.
        self.scale = widths.query**-0.5 if scores.scale is None else scores.scale
        self.temperature_tuning = scores.temperature_tuning
        self.queries = projections.queries
        self.down = projections.down
        self.norm = projections.norm
        self.expand = projections.expand
        self.output = projections.output

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        widths = self.widths
        num_tokens = x_TD.shape[0]
        q_TNH = self.queries(x_TD).reshape(num_tokens, self.num_heads, widths.query)
        latent_TR, shared_TE = jnp.split(self.down(x_TD), [widths.rank], axis=-1)
        expand_OR = weight_numbers(self.expand.weight).astype(x_TD.dtype)
        expand_NOR = expand_OR.reshape(self.num_heads, widths.plain + widths.value, widths.rank)
        # Scores q . (W c) are (W^T q) . c, so queries are multiplied once in place of all cached
        # keys.
        absorbed_TNR = matmul_by_head(
            q_TNH[..., : widths.plain], expand_NOR[:, : widths.plain], transposed=True
        )
        rotated_TNE = q_TNH[..., widths.plain :]
        shared_T1E = shared_TE[:, None]
        if self.rope is not None:
            angles = context.angles(self.rope)
            rotated_TNE = angles.rotate(rotated_TNE)
            shared_T1E = angles.rotate(shared_T1E)
        q_TNH = jnp.concatenate([absorbed_TNR, rotated_TNE], axis=-1)
        if self.temperature_tuning is not None:
            q_TNH = scale_by_position(q_TNH, context.positions_T, self.temperature_tuning)
        k_T1H = jnp.concatenate([self.norm(latent_TR)[:, None], shared_T1E], axis=-1)
        options = AttentionOptions(scale=self.scale, value_width=widths.rank)
        out_TNR, layer_pages = context.attend(
            self.layer_index, q_TNH, k_T1H, None, layer_pages, options
        )
        out_TNV = matmul_by_head(out_TNR, expand_NOR[:, widths.plain :])
        return self.output(out_TNV.reshape(num_tokens, -1)), layer_pages
