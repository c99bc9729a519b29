"""Reads what configs say of layers with a gated delta rule, and makes their modules."""

from __future__ import annotations

import functools
from dataclasses import replace

from jax.typing import DTypeLike

from jaxpage.layers.delta_net import ChannelProducts, DeltaWidths, GatedDeltaNet
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.fields import Fields


def read_delta(fields: Fields, *, grouped: bool) -> DeltaWidths:
    """Reads the widths of a gated delta net."""
    widths = DeltaWidths(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key=fields.integer("linear_key_head_dim", 128),
        value=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        grouped=grouped,
    )
    check_heads(fields, widths)
    return widths


def check_heads(fields: Fields, widths: DeltaWidths) -> None:
    """Notes an error if the number of key heads does not divide that of value heads."""
    if widths.value_heads % widths.key_heads:
        error = WrongField(
            f"linear_num_key_heads = {widths.key_heads} must divide linear_num_value_heads = {widths.value_heads}"
        )
        fields.note(error, linear_num_key_heads=1, linear_num_value_heads=1)


def check_activation(fields: Fields) -> None:
    """Refuses a `hidden_act` other than silu, which the convolutions have."""
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        text = f"hidden_act = {activation!r} is not supported: the convolution of linear attention has silu"
        fields.note(RefusedField(text), hidden_act="silu")


def make_delta_net(
    widths: DeltaWidths,
    layer_index: int,
    *,
    width: int,
    epsilon: float,
    name: str,
    dtype: DTypeLike,
) -> GatedDeltaNet:
    """Returns the module, with the names of its checkpoint.

    Args:
        widths: The widths of its heads.
        layer_index: The layer's place in its model.
        width: The width of the model.
        epsilon: The epsilon of the model's norms.
        name: The module's name in the checkpoint.
        dtype: The type of the parameters.
    """
    product = functools.partial(_product, name, dtype)
    heads = widths.value_heads
    convolved = widths.convolved
    keys, values = widths.keys, widths.values
    inward = ("embed", "heads")
    outward = ("heads", "embed")
    norm, output = "norm", "out_proj"
    if widths.apart:
        of_input = [("q_proj", keys), ("k_proj", keys), ("v_proj", values)]
        of_beta = [("b_proj", heads)]
        if not widths.by_channel:
            of_input.append(("g_proj", values))
            of_beta.append(("a_proj", heads))
        input = product(width, inward, *of_input)
        beta_step = product(width, inward, *of_beta)
        norm, output = "o_norm", "o_proj"
    elif widths.grouped:
        input = product(width, inward, ("in_proj_qkvz", convolved + values))
        beta_step = product(width, inward, ("in_proj_ba", 2 * heads))
    else:
        input = product(
            width, inward, ("in_proj_qkv", convolved), ("in_proj_z", values), each=widths.parts
        )
        beta_step = product(width, inward, ("in_proj_b", heads), ("in_proj_a", heads))
    channels = None
    if widths.by_channel:
        rank = widths.key
        ranks = product(width, ("embed", None), ("f_a_proj", rank), ("g_a_proj", rank))
        time_steps = product(rank, (None, "heads"), ("f_b_proj", widths.keys))
        gates = product(rank, (None, "heads"), ("g_b_proj", values))
        channels = ChannelProducts(ranks, time_steps, gates)
    epsilon = epsilon if widths.epsilon is None else widths.epsilon
    return GatedDeltaNet(
        layer_index,
        input,
        beta_step,
        RMSNorm(widths.value, name=f"{name}.{norm}", epsilon=epsilon, axis=None, dtype=dtype),
        product(values, outward, (output, width)),
        widths,
        channels=channels,
        name=name,
        dtype=dtype,
    )


def _product(
    name: str,
    dtype: DTypeLike,
    num_in: int,
    axes: tuple[str | None, str | None],
    *modules: tuple[str, int],
    each: tuple[int, ...] = (),
) -> Linear:
    """Returns a linear layer without bias.

    Args:
        name: The name of the delta rule's module in the checkpoint.
        dtype: The type of the parameters.
        num_in: The width of the input.
        axes: The axes of the input and of the output.
        *modules: The names of the parts in the checkpoint, with their numbers of outputs.
        each: See `Part`, for the first part.
    """
    parts = [Part(rows, axes[1], f"{name}.{module}") for module, rows in modules]
    parts[0] = replace(parts[0], each=each)
    return linear(num_in, *parts, input_axis=axes[0], bias=False, dtype=dtype)
