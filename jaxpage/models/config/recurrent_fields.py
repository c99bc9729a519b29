"""Reads what configs say of recurrent layers: Mamba, Mamba 2 and the gated delta rule."""

from __future__ import annotations

import math
from typing import Any

from jaxpage.layers import DeltaWidths, MambaSpec
from jaxpage.models.config.fields import Fields

# The forms in which files say that there is no largest time step.
_INFINITE: tuple[Any, ...] = (math.inf, {"__float__": "Infinity"})


def read_mamba(fields: Fields, inner: int | None = None, **more: Any) -> MambaSpec:
    """Reads the fields that Granite 4, Bamba and Falcon-H1 have for their layers of Mamba 2.

    Args:
        fields: The fields of the config.
        inner: The width of the inputs of all heads; None for `mamba_expand * hidden_size`.
        **more: Further fields of `MambaSpec`.
    """
    heads = fields.integer("mamba_n_heads", 128)
    inner = inner or fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    if inner % heads:
        text = (
            f"mamba_n_heads = {heads} must divide the {inner} inputs of all heads (mamba_expand "
            "* hidden_size, or mamba_d_ssm)"
        )
        fields.note_wrong(text, mamba_n_heads=1, mamba_d_head="auto")
        heads = 1
    width = fields.get("mamba_d_head", "auto")
    head = inner // heads
    if width not in ("auto", head):
        text = f'mamba_d_head must be "auto" or {inner} / mamba_n_heads = {head}, not {width!r}'
        fields.note_wrong(text, mamba_d_head="auto")
    more.setdefault("output_bias", fields.flag("mamba_proj_bias", False))
    return MambaSpec(
        heads=heads,
        head=head,
        groups=read_groups(fields, ("mamba_n_groups", 1), mamba_n_heads=heads),
        vector=fields.integer("mamba_d_state", 256),
        kernel=fields.integer("mamba_d_conv", 4),
        activation=fields.activation("hidden_act", "silu"),
        time_steps=read_time_steps(fields),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        input_bias=fields.flag("mamba_proj_bias", False),
        **more,
    )


def read_mamba2(fields: Fields, heads: str, head: str, vector: str, activation: str) -> MambaSpec:
    """Reads the fields that Mamba 2 and Nemotron-H have; the arguments name those that differ."""
    count = fields.integer(heads, 128)
    bias = fields.flag("use_bias", False)
    return MambaSpec(
        heads=count,
        head=fields.integer(head, 64),
        groups=read_groups(fields, ("n_groups", 8), **{heads: count}),
        vector=fields.integer(vector, 128),
        kernel=fields.integer("conv_kernel", 4),
        activation=fields.activation(activation, "silu"),
        time_steps=read_time_steps(fields),
        convolution_bias=fields.flag("use_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
    )


def read_groups(fields: Fields, name: tuple[str, int], **heads: int) -> int:
    """Reads the number of groups of heads, which must divide that of heads.

    Args:
        fields: The fields of the config.
        name: The name of the field, and its default.
        heads: The number of heads, by the name of its field.
    """
    ((heads_name, count),) = heads.items()
    groups = fields.integer(*name)
    if count % groups:
        text = f"{name[0]} = {groups} must divide {heads_name} = {count}"
        fields.note_wrong(text, **{name[0]: 1}, **heads)
        return 1
    return groups


def read_time_steps(fields: Fields) -> tuple[float, float]:
    """Reads `time_step_limit`, the least and the largest time step; null is no limit.

    `time_step_min` and `time_step_max` are no limits: biases were drawn between them at first.
    """
    limits = fields.get("time_step_limit", None)
    if limits is None:
        return 0.0, math.inf
    if isinstance(limits, list | tuple) and len(limits) == 2:
        minimum, maximum = (math.inf if limit in _INFINITE else limit for limit in limits)
        numbers = all(type(limit) in (int, float) for limit in (minimum, maximum))
        if numbers and 0 <= minimum <= maximum and minimum < math.inf:
            return float(minimum), float(maximum)
    text = f"time_step_limit must be two numbers from 0, the smaller one first, not {limits!r}"
    fields.note_wrong(text, time_step_limit=[0.0, math.inf])
    return 0.0, math.inf


def read_rank(fields: Fields, name: str) -> int:
    """Reads the rank of the product for Mamba's time steps."""
    if fields.get(name, "auto") == "auto":
        # As in the code of Mamba: a sixteenth of the width, rounded up.
        return -(-fields.integer("hidden_size") // 16)
    return fields.integer(name, 1)


def check_heads(fields: Fields, widths: DeltaWidths) -> None:
    """Notes an error if the number of key heads does not divide that of value heads."""
    if widths.value_heads % widths.key_heads:
        text = (
            f"linear_num_key_heads = {widths.key_heads} must divide linear_num_value_heads = "
            f"{widths.value_heads}"
        )
        fields.note_wrong(text, linear_num_key_heads=1, linear_num_value_heads=1)


def check_activation(fields: Fields) -> None:
    """Refuses a `hidden_act` other than silu, which the convolutions have."""
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        text = (
            f"hidden_act = {activation!r} is not supported: the convolution of linear attention "
            "has silu"
        )
        fields.note_unsupported(text, hidden_act="silu")
