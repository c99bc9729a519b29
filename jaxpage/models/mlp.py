"""Makes gated feed-forward halves with their names in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from jax.typing import DTypeLike

from jaxpage.layers.linear import Part, linear
from jaxpage.layers.mlp import GatedMLP


@dataclass(frozen=True)
class MLPNames:
    """Holds the names of a gated feed-forward half.

    Attributes:
        module: The half, in its layer.
        gate: The product for the gates; None where no file has it apart from the ups.
        up: The product for the ups; None like `gate`.
        down: The product for the output.
        fused: The product for both gates and ups, in files that join them.
    """

    module: str = "mlp"
    gate: str | None = "gate_proj"
    up: str | None = "up_proj"
    down: str = "down_proj"
    fused: str | None = "gate_up_proj"


LLAMA_NAMES = MLPNames()


def make_gated_mlp(
    names: MLPNames,
    width: int,
    inner: int,
    *,
    module: str,
    bias: bool,
    activation: str,
    dtype: DTypeLike,
) -> GatedMLP:
    """Returns a gated feed-forward half.

    Args:
        names: The names of its products.
        width: The width of the model.
        inner: The number of gates, and of ups.
        module: The module's name in the checkpoint.
        bias: True if the products have biases.
        activation: The name of the activation function.
        dtype: The type of the parameters.
    """

    def name_part(part: str | None) -> str | None:
        return part and f"{module}.{part}"

    gate_up = linear(
        width,
        Part(inner, "ffn", name_part(names.gate)),
        Part(inner, "ffn", name_part(names.up)),
        fused=name_part(names.fused),
        input_axis="embed",
        bias=bias,
        dtype=dtype,
    )
    part = Part(width, "embed", name_part(names.down))
    down = linear(inner, part, input_axis="ffn", bias=bias, dtype=dtype)
    return GatedMLP(gate_up, down, activation=activation)
