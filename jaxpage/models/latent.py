"""What the configs of models with latent attention say of it, and its module under the names of their checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jax.typing import DTypeLike

from jaxpage.layers.latent_attention import LatentAttention, LatentQueries, LatentWidths
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.rope import Rope
from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import NO_ROPE, Fields

NORM_EPSILON = 1e-6  # of latents, whatever the config says of other norms


@dataclass(frozen=True)
class LatentSpec:
    """bias: of the products that make latents, and of the output."""

    widths: LatentWidths
    scale: float
    bias: bool


def read_latent(
    fields: Fields, *, longest: int, query_rank: int, plain: int, value: int
) -> tuple[LatentSpec, Rope, int]:
    """Returns the latent attention, its rotation, and the number of positions for which that holds.

    longest, query_rank, plain, value: a family's defaults of `max_position_embeddings`, `q_lora_rank`, `qk_nope_head_dim`
    and `v_head_dim`.
    """
    widths = LatentWidths(
        rank=fields.integer("kv_lora_rank", 512),
        turned=fields.integer("qk_rope_head_dim", 64),
        plain=fields.integer("qk_nope_head_dim", plain),
        value=fields.integer("v_head_dim", value),
        query_rank=fields.optional_integer("q_lora_rank", query_rank),
    )
    rope, length = fields.rope(widths.turned, fields.integer("max_position_embeddings", longest))
    scale = widths.query**-0.5 * _stretch(fields) ** 2
    spec = LatentSpec(widths, scale, fields.flag("attention_bias", False))
    return spec, replace(rope, interleaved=fields.flag("rope_interleave", True)), length


def _stretch(fields: Fields) -> float:
    """The root of what YaRN's `mscale_all_dim` multiplies scores by."""
    parameters = fields.get("rope_scaling", None) or fields.get("rope_parameters", None) or {}
    factor, share = parameters.get("factor", 1.0), parameters.get("mscale_all_dim") or 0.0
    for name, value in (("factor", factor), ("mscale_all_dim", share)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e30:
            error = WrongField(f"rope {name} must be a positive number, not {value!r}")
            fields.note(error, **NO_ROPE)
            return 1.0
    if (
        parameters.get("rope_type", parameters.get("type", "default")) == "default"
        or not share
        or factor <= 1
    ):
        return 1.0
    return 0.1 * share * math.log(factor) + 1.0


def make_latent_attention(
    spec: LatentSpec,
    layer_index: int,
    *,
    width: int,
    num_heads: int,
    rope: Rope,
    name: str,
    dtype: DTypeLike,
) -> LatentAttention:
    """width: of the model. name: of the checkpoint's module."""
    widths = spec.widths

    def product(
        num_in: int, rows: int, axes: tuple[str | None, str | None], module: str, bias: bool
    ) -> Linear:
        return linear(
            num_in,
            Part(rows, axes[1], f"{name}.{module}"),
            input_axis=axes[0],
            bias=bias,
            dtype=dtype,
        )

    def norm(rank: int, module: str) -> RMSNorm:
        return RMSNorm(rank, name=f"{name}.{module}", epsilon=NORM_EPSILON, axis=None, dtype=dtype)

    query_rows = num_heads * widths.query
    queries: Linear | LatentQueries
    if widths.query_rank is None:
        queries = product(width, query_rows, ("embed", "heads"), "q_proj", False)
    else:
        rank = widths.query_rank
        queries = LatentQueries(
            product(width, rank, ("embed", None), "q_a_proj", spec.bias),
            norm(rank, "q_a_layernorm"),
            product(rank, query_rows, (None, "heads"), "q_b_proj", False),
        )
    expand = product(
        widths.rank, num_heads * (widths.plain + widths.value), (None, "heads"), "kv_b_proj", False
    )
    return LatentAttention(
        layer_index,
        queries,
        product(width, widths.kept, ("embed", None), "kv_a_proj_with_mqa", spec.bias),
        norm(widths.rank, "kv_a_layernorm"),
        Linear(replace(expand.spec, multiplied=False)),
        product(num_heads * widths.value, width, ("heads", "embed"), "o_proj", spec.bias),
        widths,
        num_heads=num_heads,
        rope=rope,
        scale=spec.scale,
    )
