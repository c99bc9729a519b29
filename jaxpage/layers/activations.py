"""Names the activation functions as checkpoints name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpage.layers.trace_scope import row_kernels

Activation = Callable[[jax.Array], jax.Array]


def quick_gelu(x: jax.Array) -> jax.Array:
    """Returns the approximation of GELU by a sigmoid."""
    return x * jax.nn.sigmoid(1.702 * x)


def relu_squared(x: jax.Array) -> jax.Array:
    """Returns the square of ReLU."""
    return jnp.square(jax.nn.relu(x))


_gelu_exact = partial(jax.nn.gelu, approximate=False)
_gelu_tanh = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Activation] = {
    "gelu": _gelu_exact,
    "gelu_python": _gelu_exact,
    # These names share one formula: in transformers they differ in the code, not in the result.
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": jax.nn.relu,
    "relu2": relu_squared,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
# The formulas that kernels have, with their names there.
_IN_KERNELS = {_gelu_tanh: "gelu_tanh", jax.nn.silu: "silu", _gelu_exact: "gelu"}


def name_in_kernels(activation: str) -> str | None:
    """Returns the name that a function has in kernels (`rows.ACTIVATIONS`); None for no kernel."""
    return _IN_KERNELS.get(ACTIVATIONS[activation])


def activate(x: jax.Array, activation: str | None) -> jax.Array:
    """Returns the function's value; x itself for None."""
    return x if activation is None else ACTIVATIONS[activation](x)


def gate(both_TF: Float[Array, "T F2"], activation: str) -> Float[Array, "T F"]:
    """Returns `activation(gate) * up`, where each row has the gates and then the ups."""
    function = ACTIVATIONS[activation]
    kernels = row_kernels(both_TF.dtype)
    if kernels is not None and (name := name_in_kernels(activation)) is not None:
        return kernels.gate(both_TF, name)
    gate_TF, up_TF = jnp.split(both_TF, 2, axis=-1)
    return function(gate_TF) * up_TF
