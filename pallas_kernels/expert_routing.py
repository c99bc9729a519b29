"""Chooses the experts of tokens, and sorts rows by expert."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.kernel_set import Call, no_kernel
from pallas_kernels.sets import first_that_takes


def choose_experts(
    logits_TE: Float[Array, "T E"],
    correction_E: Float[Array, "E"] | None,
    count: int,
    *,
    sigmoid: bool,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "T X"], Int[Array, "T X"]]:
    """Chooses the `count` experts that are rated highest, in one launch.

    Of equal ratings the first comes first.

    Args:
        logits_TE: The logits of the experts.
        correction_E: What is added to the scores of each expert to rate it; None for nothing.
        count: The number of experts of a token.
        sigmoid: True if scores are sigmoids; otherwise they are `exp(logits - their maximum)`.
        backend: One of `BACKENDS`, or "auto", as in `paged_attention`.
        interpret: Runs a kernel on CPU, operation by operation.

    Returns:
        The scores of the chosen experts, and these experts.

    Raises:
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    chosen: tuple[jax.Array, jax.Array] = first_that_takes(
        "choose_experts",
        lambda each: functools.partial(each.matmuls.choose_experts or no_kernel, sigmoid=sigmoid),
        logits_TE,
        correction_E,
        count,
        call=Call(interpret=interpret),
        backend=backend,
    )
    return chosen


def gather_by_group(
    x_TI: Shaped[Array, "T I"],
    group_P: Int[Array, "P"],
    num_groups: int,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[Shaped[Array, "P I"], Int[Array, "P"], Int[Array, "P"], Int[Array, "E"]]:
    """Sorts pairs of a row and a group by group, for `grouped_matmul`, in one launch.

    Each row has equally many pairs, one after another. Pairs of one group stay in their order. A
    number that is no group's comes last.

    Args:
        x_TI: The rows.
        group_P: The group of each pair.
        num_groups: The number of groups.
        backend: One of `BACKENDS`, or "auto", as in `paged_attention`.
        interpret: Runs a kernel on CPU, operation by operation.

    Returns:
        The row of each pair, sorted; the place of each pair; the groups, sorted; and the number of
        pairs of each group.

    Raises:
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    sorted_pairs: tuple[jax.Array, jax.Array, jax.Array, jax.Array] = first_that_takes(
        "gather_by_group",
        lambda each: each.matmuls.gather_by_group or no_kernel,
        x_TI,
        group_P,
        num_groups,
        call=Call(interpret=interpret),
        backend=backend,
    )
    return sorted_pairs
