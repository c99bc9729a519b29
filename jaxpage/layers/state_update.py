"""Updates the states of recurrent layers by a token, and reads them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpage.layers.matmul import matmul_by_state
from jaxpage.layers.trace_scope import row_kernels


def update_state(
    state_BNKV: Float[Array, "B N K V"],
    decay: Float[Array, "B N _ _"],
    k_BNK: Float[Array, "B N K"],
    v_BNV: Float[Array, "B N V"],
    q_BNK: Float[Array, "B N K"],
    beta_BN: Float[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B N K V"], Float[Array, "B N V"]]:
    """Returns the states S after a token, and what its query reads of them.

    The state decays. Then the value that it has for the key is replaced, to the share `beta`; or
    the value is added to it, where there is no `beta`.

    Args:
        state_BNKV: The states before the token, in float32, as all arrays.
        decay: The factors of the states, with one number for an axis along which they are equal.
        k_BNK: The keys.
        v_BNV: The values.
        q_BNK: The queries.
        beta_BN: The shares; None if values are added.
    """
    kernels = row_kernels(jnp.float32)
    if kernels is not None and kernels.update_state is not None:
        return kernels.update_state(state_BNKV, decay, k_BNK, v_BNV, q_BNK, beta_BN)
    state_BNKV = state_BNKV * decay
    change_BNV = v_BNV
    if beta_BN is not None:
        change_BNV = (v_BNV - matmul_by_state(k_BNK, state_BNKV)) * beta_BN[..., None]
    state_BNKV = state_BNKV + k_BNK[..., None] * change_BNV[:, :, None]
    return state_BNKV, matmul_by_state(q_BNK, state_BNKV)
