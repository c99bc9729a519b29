"""Computes the feed-forward half of a layer with all that is around it in one call."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from jaxpage.layers.activations import name_in_kernels
from jaxpage.layers.fusion import AddAndNorm, AddSum, Gate, Multiply, Stage, fusion_kernel, takes
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.norms import RMSNorm, add_before_norm
from jaxpage.layers.packed import PackedLinear
from jaxpage.layers.producers import MadeByMatmul
from jaxpage.layers.quantized import QuantizedLinear
from jaxpage.layers.trace_scope import trace_scope


@jax.named_scope("matmul")
def add_and_feed(
    norm: Any,
    mlp: Any,
    x_TD: Float[Array, "T D"],
    added_TD: Float[Array, "T D"],
    factor: float = 1.0,
) -> Float[Array, "T D"] | None:
    """Returns `s + factor * mlp(norm(s))` of the sum s of both rows; None where no kernel does.

    One call computes all of it; with another factor than 1, all but the last sum. If the second
    rows are a product, the call computes it, too.
    """
    run_fusion = fusion_kernel(x_TD.dtype)
    # Exact types, because a derived layer may compute more than the kernel does.
    if run_fusion is None or type(norm) is not RMSNorm or norm.scale is None or norm.groups > 1:
        return None
    if type(mlp) is not GatedMLP or (name := name_in_kernels(mlp.activation)) is None:
        return None
    stages: list[Stage] = [AddAndNorm(x_TD, norm.scale[...]), Gate(name)]
    for place, linear in ((1, mlp.gate_up), (3, mlp.down)):
        if type(linear) not in (PackedLinear, QuantizedLinear):
            return None
        # The call has no stages for a bias, adapters or sums of another type.
        is_plain = linear.bias is None and linear.lora is None and linear.result is None
        weight = linear.weight
        if not is_plain or not takes(weight, x_TD.dtype):
            return None
        stages.insert(place, Multiply(weight))
    if factor != 1.0:
        sum_TD, *_, fed_TD = run_fusion(added_TD, stages, norm.epsilon, norm.offset)
        return add_before_norm(sum_TD, fed_TD * factor)
    matmul = trace_scope().producers.find(added_TD, MadeByMatmul)
    if matmul is not None:
        added_TD = matmul.x_TI
        stages.insert(0, Multiply(matmul.weight))
    return run_fusion(added_TD, [*stages, AddSum()], norm.epsilon, norm.offset)[-1]
