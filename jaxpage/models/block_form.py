"""Describes the norms of a decoder's layers and the order of their halves, and makes the norms."""

from __future__ import annotations

from dataclasses import dataclass

from jax.typing import DTypeLike

from jaxpage.layers.norms import HeadNorm, LayerNorm, RMSNorm
from jaxpage.layers.parameter import Source, stack, tensor

Norm = RMSNorm | LayerNorm


@dataclass(frozen=True)
class BlockForm:
    """Describes the norms of a layer, and the order of its halves.

    Attributes:
        norms: The names of the norms in the checkpoint: before attention, after it, before the
            feed-forward half, after it; None for a norm that does not exist.
        kind: "rms" for RMS norms; "layer" for a LayerNorm with scale and bias, "layer-bias" for one
            with a scale alone, "plain" for one with neither; "rms+1" and "layer+1" for those whose
            stored scale is less 1, and "rms-plain" for RMS norms without scales.
        together: True if norms of queries and keys are over all heads together (see `norm_heads`).
        head_scales: Norms of queries and keys have one scale for all heads where it is "shared". A
            `HeadNorm` has one for each: in one tensor if "stacked", in a tensor each if "apart".
            RMS norms have no scale if "none".
        turned_first: True if queries and keys are turned before their norms.
        parallel: True if both halves take the layer's input, after the norm before attention where
            the feed-forward half has no norm before it.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    kind: str = "rms"
    together: bool = False
    head_scales: str = "shared"
    turned_first: bool = False
    parallel: bool = False

    def norm(
        self, width: int, *, name: str, epsilon: float, axis: str | None = "embed", dtype: DTypeLike
    ) -> Norm:
        """Returns a norm of this kind."""
        offset = 1.0 if self.kind.endswith("+1") else 0.0
        if not self.kind.startswith("rms"):
            affine = self.kind != "plain"
            return LayerNorm(
                width,
                name=name,
                epsilon=epsilon,
                axis=axis,
                affine=affine,
                bias=affine and self.kind != "layer-bias",
                offset=offset,
                dtype=dtype,
            )
        weight_name = None if self.kind == "rms-plain" else name
        return RMSNorm(
            width, name=weight_name, epsilon=epsilon, axis=axis, offset=offset, dtype=dtype
        )

    def head_norm(
        self,
        num_rows: int,
        head_dim: int,
        axis: str,
        *,
        name: str,
        epsilon: float,
        dtype: DTypeLike,
    ) -> Norm | HeadNorm:
        """Returns the norm of queries or of keys, of which all heads have this number of rows."""
        if self.head_scales == "none":
            return RMSNorm(head_dim, name=None, epsilon=epsilon, dtype=dtype)
        if self.head_scales != "shared":
            source = _head_scales(name, num_rows // head_dim, head_dim, self.head_scales)
            return HeadNorm(source, axis=axis, epsilon=epsilon, dtype=dtype)
        width, over = (num_rows, axis) if self.together else (head_dim, None)
        return self.norm(width, name=name, epsilon=epsilon, axis=over, dtype=dtype)


LLAMA_FORM = BlockForm()


def _head_scales(name: str, num_heads: int, head_dim: int, kind: str) -> Source:
    """Returns the scales of a `HeadNorm`; see `BlockForm.head_scales`."""
    if kind == "stacked":
        return tensor(f"{name}.weight", num_heads, head_dim)
    norms = f"{name.removesuffix('_norm')}_layernorm.norms"
    return stack([tensor(f"{norms}.{head}.weight", head_dim) for head in range(num_heads)])
