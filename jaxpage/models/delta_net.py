"""What configs say of layers with a gated delta rule, and their module under the names of their checkpoints."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxpage.errors import CheckpointError
from jaxpage.layers.delta_net import DeltaWidths, GatedDeltaNet
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.models.fields import Fields


def read_delta(fields: Fields, *, grouped: bool) -> DeltaWidths:
    widths = DeltaWidths(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key=fields.integer("linear_key_head_dim", 128),
        value=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        grouped=grouped,
    )
    if widths.value_heads % widths.key_heads:
        raise CheckpointError(
            f"config.json: linear_num_key_heads = {widths.key_heads} must divide "
            f"linear_num_value_heads = {widths.value_heads}"
        )
    return widths


def make_delta_net(
    widths: DeltaWidths, layer_index: int, *, width: int, epsilon: float, name: str, dtype: DTypeLike
) -> GatedDeltaNet:
    """width: of the model. epsilon: of the norm. name: of the checkpoint's module."""
    heads = widths.value_heads
    rows = [("in_proj_qkvz", widths.convolved + widths.values), ("in_proj_ba", 2 * heads)]
    if not widths.grouped:
        rows = [
            ("in_proj_qkv", widths.convolved),
            ("in_proj_b", heads),
            ("in_proj_a", heads),
            ("in_proj_z", widths.values),
        ]
    parts = (Part(count, "heads", f"{name}.{module}") for module, count in rows)
    return GatedDeltaNet(
        layer_index,
        linear(width, *parts, input_axis="embed", bias=False, dtype=dtype),
        RMSNorm(widths.value, name=f"{name}.norm", epsilon=epsilon, axis=None, dtype=dtype),
        linear(widths.values, Part(width, "embed", f"{name}.out_proj"), input_axis="heads", bias=False, dtype=dtype),
        widths,
        name=name,
        dtype=dtype,
    )
