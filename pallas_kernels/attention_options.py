"""Defines the options of attention: one record, passed whole from a model's layer to the kernel."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_OF_HEADS = ("sinks", "alibi_slopes")
_ARRAYS = (*_OF_HEADS, "tree_mask_TQ", "last_seen_T")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Says how a call of attention scores positions, which of them a token sees, and what it reads.

    A new option is a field of this record, a part of the definition (`sets/reference.py`), and its
    name in `honours` of every kernel set that computes it. All other sets refuse it by that name.

    Attributes:
        scale: The factor of the scores, usually H ** -0.5.
        sliding_window: The number of positions that a token sees, its own included; None for all.
        attention_chunk: The number of positions of a chunk. A token sees the positions of its own
            chunk, from the last multiple of this number on, and no earlier ones (Llama 4); None for
            all.
        logit_softcap: Scores become softcap * tanh(scores / softcap).
        value_width: The width of the values, which are the first numbers of the keys; there are no
            pages of values then. Such keys are latents, of which an absorbed product makes values
            afterwards (DeepSeek's MLA).
        sinks: One more logit for the softmax of each query head, which has no value: its weight is
            lost (GPT-OSS). Calls take it in float32.
        alibi_slopes: A slope for each query head. The score of a position that is n tokens before
            the query's own falls by n times the slope, after the softcap (ALiBi; Press et al.,
            2021). Calls take it in float32.
        tree_mask_TQ: `tree_mask_TQ[t, j]` says whether query token t sees query token j of its row.
            It replaces the causal order.
        last_seen_T: The last position of its row that each query token sees, if that comes after
            its own: what is in the row's context is seen, and no more. `sliding_window` bounds what
            it sees of earlier positions, and is counted from its own.
    """

    scale: float
    sliding_window: int | None = None
    attention_chunk: int | None = None
    logit_softcap: float | None = None
    value_width: int | None = None
    sinks: Float[Array, "N"] | None = None
    alibi_slopes: Float[Array, "N"] | None = None
    tree_mask_TQ: Bool[Array, "T Q"] | None = None
    last_seen_T: Int[Array, "T"] | None = None

    def __post_init__(self) -> None:
        # A number becomes Python's own: NumPy's has a type, which results in JAX could take on.
        object.__setattr__(self, "scale", _number("scale", self.scale))
        if self.logit_softcap is not None:
            object.__setattr__(self, "logit_softcap", _number("logit_softcap", self.logit_softcap))
            if self.logit_softcap <= 0:
                raise ValueError(f"logit_softcap must be above 0, not {self.logit_softcap}")
        for name in ("sliding_window", "attention_chunk", "value_width"):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, at_least_one(name, number))

    @property
    def set_names(self) -> frozenset[str]:
        """Returns the names of the options that are not None."""
        names = (field.name for field in dataclasses.fields(self))
        return frozenset(name for name in names if getattr(self, name) is not None)

    @property
    def static(self) -> AttentionOptions:
        """Returns the options without their arrays; they can be hashed."""
        return dataclasses.replace(
            self, sinks=None, alibi_slopes=None, tree_mask_TQ=None, last_seen_T=None
        )

    def check(
        self,
        q_TNH: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array | None,
        block_table_BM: jax.Array,
        *,
        interleaved: bool = False,
    ) -> AttentionOptions:
        """Returns the options as a call with these arrays takes them.

        A chunk that no row is longer than counts as none, so that every kernel set takes it.

        Raises:
            ValueError: An option does not fit the arrays.
        """
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        arrays = {
            name: None if array is None else jnp.asarray(array) for name, array in arrays.items()
        }
        tree = arrays["tree_mask_TQ"]
        num_tokens, num_heads, _ = q_TNH.shape
        for name in _OF_HEADS:
            if (each := arrays[name]) is not None:
                if each.shape != (num_heads,) or not jnp.issubdtype(each.dtype, jnp.floating):
                    raise ValueError(
                        f"{name} must hold a float for each of {num_heads} query heads, "
                        f"not {each.dtype} of shape {each.shape}"
                    )
                arrays[name] = each.astype(jnp.float32)
        if tree is not None:
            is_mask = tree.ndim == 2 and tree.shape[1] > 0 and tree.dtype == jnp.bool_
            if not is_mask or tree.shape[0] != num_tokens:
                raise ValueError(
                    f"tree_mask_TQ must hold a bool for each of {num_tokens} query tokens and the "
                    "tokens of its row, "
                    f"not {tree.dtype} of shape {tree.shape}"
                )
        if (last := arrays["last_seen_T"]) is not None:
            if last.shape != (num_tokens,) or not jnp.issubdtype(last.dtype, jnp.integer):
                raise ValueError(
                    f"last_seen_T must hold an integer for each of {num_tokens} query tokens, not "
                    f"{last.dtype} of shape {last.shape}"
                )
            arrays["last_seen_T"] = last.astype(jnp.int32)
        if interleaved and self.value_width is not None:
            raise ValueError("value_width means values within the keys, not interleaved pages")
        if not interleaved and (self.value_width is None) == (v_pages is None):
            raise ValueError("either v_pages or value_width must be given, and not both")
        if self.value_width is not None and self.value_width > k_pages.shape[3]:
            raise ValueError(
                f"value_width must be at most the width of k_pages, {k_pages.shape[3]}, not "
                f"{self.value_width}"
            )
        max_length = block_table_BM.shape[1] * k_pages.shape[1]
        is_one = self.attention_chunk is not None and self.attention_chunk >= max_length
        chunk = None if is_one else self.attention_chunk
        return dataclasses.replace(self, attention_chunk=chunk, **arrays)


def register_record(kind: type, arrays: tuple[str, ...]) -> None:
    """Makes a frozen dataclass a pytree of these fields; the others are static.

    JAX makes such a record again without its checks, because JAX does not always put arrays into
    the fields.
    """
    static = tuple(field.name for field in dataclasses.fields(kind) if field.name not in arrays)

    def flatten(record: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(record, name) for name in arrays), tuple(
            getattr(record, name) for name in static
        )

    def unflatten(static_values: tuple[Any, ...], children: tuple[Any, ...]) -> Any:
        record: Any = object.__new__(kind)
        for name, value in zip((*arrays, *static), (*children, *static_values), strict=True):
            object.__setattr__(record, name, value)
        return record

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)


register_record(AttentionOptions, _ARRAYS)


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number that is known when the call is traced, not {value!r}"
        )
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)


def at_least_one(name: str, value: object) -> int:
    """Returns an argument that counts something.

    Raises:
        TypeError: It is no integer; the message names the argument.
        ValueError: It is below 1.
    """
    if not isinstance(value, Integral):
        raise TypeError(
            f"{name} must be an integer that is known when the call is traced, not {value!r}"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return int(value)
