"""Multi-head latent attention (DeepSeek-AI, 2024): a token keeps one latent, of which all heads would make their keys and values.

They are never made. The product that would make a head's keys is applied to its queries in their place, and the one that would make its
values to what attention gives (absorption). So attention sees one key/value head: keys are a latent and a rotated part that all heads
share, values are the latent alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers.context import AttentionOptions, ForwardContext, LayerPages
from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.product import product_by_head, weight_numbers
from jaxpage.layers.rope import Rope


@dataclass(frozen=True)
class LatentWidths:
    """rank: of the latent. turned: of the part of keys that is rotated, and shared. plain, value: of the rest of a head's keys, and of its
    values, as they would be made. query_rank: of the latent of queries; None: they have none."""

    rank: int
    turned: int
    plain: int
    value: int
    query_rank: int | None

    @property
    def kept(self) -> int:
        """Numbers that a token keeps."""
        return self.rank + self.turned

    @property
    def query(self) -> int:
        return self.plain + self.turned


class LatentQueries(nnx.Module):
    """`up(norm(down(x)))`."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear):
        self.down, self.norm, self.up = down, norm, up

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T Q"]:
        return self.up(self.norm(self.down(x_TD)))


class LatentAttention(nnx.Module):
    """queries: to heads of `widths.query`, the plain part first. down: to the latent and to the part that is rotated.

    norm: of the latent. expand: the product that would make each head's keys and values of it. Where its weight is quantised, it is
    dequantised in each step, for as long as the layer needs it.
    """

    def __init__(
        self,
        layer_index: int,
        queries: Linear | LatentQueries,
        down: Linear,
        norm: RMSNorm,
        expand: Linear,
        output: Linear,
        widths: LatentWidths,
        *,
        num_heads: int,
        rope: Rope,
        scale: float,
    ):
        self.layer_index, self.num_heads, self.widths = layer_index, num_heads, widths
        self.rope, self.scale = rope, scale
        self.queries, self.down, self.norm, self.expand, self.output = (
            queries,
            down,
            norm,
            expand,
            output,
        )

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        widths, num_tokens = self.widths, x_TD.shape[0]
        q_TNH = self.queries(x_TD).reshape(num_tokens, self.num_heads, widths.query)
        latent_TR, shared_TE = jnp.split(self.down(x_TD), [widths.rank], axis=-1)
        expand_OR = weight_numbers(self.expand.weight).astype(x_TD.dtype)
        expand_NOR = expand_OR.reshape(self.num_heads, widths.plain + widths.value, widths.rank)
        angles = context.angles(self.rope)
        absorbed_TNR = product_by_head(
            q_TNH[..., : widths.plain], expand_NOR[:, : widths.plain], transposed=True
        )
        q_TNH = jnp.concatenate([absorbed_TNR, angles.rotate(q_TNH[..., widths.plain :])], axis=-1)
        k_T1H = jnp.concatenate(
            [self.norm(latent_TR)[:, None], angles.rotate(shared_TE[:, None])], axis=-1
        )
        options = AttentionOptions(scale=self.scale, value_width=widths.rank)
        out_TNR, layer_pages = context.attend(
            self.layer_index, q_TNH, k_T1H, None, layer_pages, options
        )
        out_TNV = product_by_head(out_TNR, expand_NOR[:, widths.plain :])
        return self.output(out_TNV.reshape(num_tokens, -1)), layer_pages
