"""Binds the kernels to the layers: the seam `attend` writes a layer's new keys and values, then reads through the block tables."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxpage.device.kv_pages import LayerPages
from jaxpage.device.step_inputs import StepInputs
from jaxpage.errors import UnsupportedError
from jaxpage.layers.attention import Attend
from pallas_kernels import INTERPRETABLE_BACKENDS, XLA_BACKENDS, paged_attention, write_kv

OLDEST_GPU = {"triton": (8, 0), "mosaic": (9, 0)}  # compute capability: Ampere, Hopper


class Backend(NamedTuple):
    """What computes attention, and what writes keys and values."""

    name: str  # one of BACKENDS, or "auto"
    interpret: bool = False  # a kernel on CPU, operation by operation

    @property
    def writer(self) -> str:
        """The backend of `write_kv` that goes with it."""
        return "auto" if self.name == "auto" else "xla" if self.name in XLA_BACKENDS else "triton"


def choose_backend(name: str, device: jax.Device) -> Backend:
    """What an engine on this device uses for a value of the setting. Kernels are interpreted on CPU.

    Raises:
        UnsupportedError: the device does not run that backend; the text says what it needs.
    """
    if device.platform == "cpu":
        interpret = name != "auto" and name not in XLA_BACKENDS
        if interpret and name not in INTERPRETABLE_BACKENDS:
            raise UnsupportedError(
                f"attention_backend {name!r} needs a GPU: jax {jax.__version__} does not interpret it"
            )
        return Backend(name, interpret)
    capability = tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))
    if name == "auto":
        return Backend("auto" if capability >= OLDEST_GPU["triton"] else "scan")
    if capability < OLDEST_GPU.get(name, (0, 0)):
        needed = ".".join(map(str, OLDEST_GPU[name]))
        raise UnsupportedError(
            f"attention_backend {name!r} needs a GPU of compute capability {needed} or more, but {device.device_kind} has "
            f"{'.'.join(map(str, capability))}; use {' or '.join(XLA_BACKENDS)}"
        )
    return Backend(name)


def make_attend(inputs: StepInputs, *, backend: Backend, max_query_len: int) -> Attend:
    """The seam for one step. A backend that fuses write and read would take both arguments here; the layers would not know."""

    def attend(
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        layer_pages: LayerPages,
        /,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> tuple[jax.Array, LayerPages]:
        pages = LayerPages(
            *write_kv(
                k_TKH,
                v_TKH,
                layer_pages.k_pages,
                layer_pages.v_pages,
                inputs.slots_T,
                k_scale=layer_pages.k_scale,
                v_scale=layer_pages.v_scale,
                backend=backend.writer,
                interpret=backend.interpret,
            )
        )
        out_TNH = paged_attention(
            q_TNH,
            pages.k_pages,
            pages.v_pages,
            inputs.block_table_BM,
            inputs.context_len_B,
            inputs.query_start,
            scale=scale,
            sliding_window=sliding_window,
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
            backend=backend.name,
            interpret=backend.interpret,
            max_query_len=max_query_len,
        )
        return out_TNH, pages

    return attend
