"""Mamba alone (Gu and Dao, 2023) has no attention and no feed-forward layers.

What a sequence keeps does not grow with its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxpage.layers.context import ForwardContext
from jaxpage.layers.mamba1 import Mamba1, Mamba1Spec
from jaxpage.models import nemotron_h
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.fields import Fields
from jaxpage.models.mamba2 import LONGEST, ignored, prefix
from jaxpage.models.mamba_config import read_rank
from jaxpage.models.nemotron_h import LINEAR
from jaxpage.models.rotary_decoder import RotaryDecoderSpec

__all__ = ["Model", "Spec", "ignored", "prefix"]


class Spec(nemotron_h.Spec):
    """Reads transformers' `MambaConfig`.

    Among the layers of the cache the states of all layers come first. After them come the inputs of
    the convolutions.
    """

    model_type: ClassVar[str] = "mamba"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, cls.model_type) as fields:
            mamba = cls.read_mamba(fields)
            num_layers = fields.integer("num_hidden_layers")
            # No layer attends. A spec has heads of attention all the same.
            fields.config |= {"num_attention_heads": 1, "intermediate_size": mamba.inner}
            spec = cls._from_fields(
                fields,
                num_kv_heads=1,
                head_dim=64,
                max_position_embeddings=LONGEST,
                epsilon=("layer_norm_epsilon", 1e-5),
                activation="silu",
                tied=True,
                rope_by_layer=(None,) * num_layers,
                recurrent=mamba,
                name="backbone",
                types=(LINEAR,) * num_layers,
            )
        states = (mamba.state,) * num_layers + (mamba.convolved,) * num_layers
        windows = (None,) * len(states)
        kv = KVSpec(len(states), 1, 64, windows, states=states, decoder_layers=num_layers)
        return replace(spec, kv=kv)

    @classmethod
    def read_mamba(cls, fields: Fields) -> Mamba1Spec:
        """Returns the description of the layers."""
        width = fields.integer("hidden_size")
        return Mamba1Spec(
            inner=fields.integer("intermediate_size", fields.integer("expand", 2) * width),
            vector=fields.integer("state_size", 16),
            rank=read_rank(fields, "time_step_rank"),
            kernel=fields.integer("conv_kernel", 4),
            activation=fields.activation("hidden_act", "silu"),
            convolution_bias=fields.flag("use_conv_bias", True),
            bias=fields.flag("use_bias", False),
            normed=False,
        )


class Model(nemotron_h.Model):
    """Computes the model; see `models.base.Model`."""

    def __init__(self, spec: nemotron_h.Spec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer.mixer, Mamba1)
            layer.mixer.convolution_index = len(self.layers) + index

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        num_layers = len(self.layers)
        by_layer = tuple(zip(pages[:num_layers], pages[num_layers:], strict=True))
        output_TD, by_layer, entering = run_layers(
            self.layers, self.norm, self.tokens(token_ids_T), by_layer, context
        )
        states, convolved = zip(*by_layer, strict=True)
        return output_TD, (*states, *convolved), entering
