"""Checks what configs say of layers with a gated delta rule."""

from __future__ import annotations

from jaxpage.layers.delta_net import DeltaWidths
from jaxpage.models.config.config_fields import RefusedField, WrongField
from jaxpage.models.config.fields import Fields


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
