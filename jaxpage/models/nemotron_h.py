"""Nemotron-H and Nemotron Nano 2 (NVIDIA, 2025) have Mamba 2, attention or a feed-forward layer.

Each layer is one of the three, after a norm. Attention has no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.embedding import token_tables
from jaxpage.layers.mamba import MambaSpec
from jaxpage.layers.mamba1 import Mamba1Spec
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.mamba_config import make_mamba, read_groups, read_time_steps
from jaxpage.models.rotary_decoder import RotaryDecoderSpec, make_attention, make_mlp

__all__ = ["Model", "Spec", "ignored", "prefix"]

FULL = "full_attention"
LINEAR = "linear_attention"
MLP = "mlp"
KINDS = (FULL, LINEAR, MLP)
EXPERTS = "moe"
OLDER = {"attention": FULL, "mamba": LINEAR}
PATTERN = {"M": LINEAR, "E": EXPERTS, "*": FULL, "-": MLP}
# What stands in for the layers of a config that is refused, so that its other fields are read.
_CORRECTED = {"layer_types": [FULL], "layers_block_type": [FULL], "hybrid_override_pattern": None}
# transformers has the first name in memory, files have the second one.
prefix = ("model.", "backbone.")
ignored = ("*mtp.*",)
# The names of these fields in older files outrank those of the class.
_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}


@dataclass(frozen=True, kw_only=True)
class Spec(RotaryDecoderSpec):
    """Reads transformers' `NemotronHConfig`; `types` has the kind of each layer."""

    types: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        config = dict(config)
        for older, name in _RENAMED.items():
            if older in config:
                config[name] = config.pop(older)
        with Fields(config, "nemotron_h", {"layer_types": "layers_block_type"}) as fields:
            types = _layer_types(fields)
            # As in transformers, the number of layers is that of the types.
            fields.config["num_hidden_layers"] = len(types)
            if fields.flag("tie_word_embeddings", False):
                text = "tie_word_embeddings = true is not supported for this family: transformers ties nothing"
                fields.note(RefusedField(text), tie_word_embeddings=False)
            mamba = _read_mamba(fields)
            head_dim = fields.integer("head_dim", 128)
            with_pages = [kind for kind in types if kind != MLP]
            spec = cls._from_fields(
                fields,
                num_kv_heads=fields.integer("num_key_value_heads", 8),
                head_dim=head_dim,
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation=("mlp_hidden_act", "relu2"),
                mlp_bias=fields.flag("mlp_bias", False),
                plain_mlp=("up_proj", "down_proj"),
                rope_by_layer=(None,) * len(with_pages),
                recurrent=mamba,
                types=types,
            )
        kv = KVSpec(
            len(with_pages),
            spec.kv.num_kv_heads,
            head_dim,
            (None,) * len(with_pages),
            states=tuple(mamba.state if kind == LINEAR else None for kind in with_pages),
            decoder_layers=len(types),
        )
        return replace(spec, kv=kv)


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Returns the kind of each layer, from a list or from a pattern of letters."""
    pattern = fields.get("hybrid_override_pattern", None)
    if fields.get("layer_types", None) is not None:
        layer_types = fields.in_file("layer_types")
        types = fields.get("layer_types", None)
    elif isinstance(pattern, str):
        layer_types = f"hybrid_override_pattern = {pattern!r}"
        types = [PATTERN.get(letter, letter) for letter in pattern]
    elif pattern is None:
        layer_types = "without layers_block_type and hybrid_override_pattern, a model"
        types = [LINEAR, EXPERTS, FULL, MLP]
    else:
        layer_types = f"hybrid_override_pattern = {pattern!r}"
        types = None
    types = [OLDER.get(str(kind), kind) for kind in types] if isinstance(types, list) else []
    if not {*map(str, types)} - {MLP}:
        text = f"{layer_types} must name layers of {FULL} (*), {LINEAR} (M) and {MLP} (-), and not the last alone"
        fields.note(WrongField(text), **_CORRECTED)
    elif EXPERTS in types:
        text = f"{layer_types} has layers with experts (Nemotron 3), which are not supported"
        fields.note(RefusedField(text), **_CORRECTED)
    elif unknown := sorted({str(kind) for kind in types} - {*KINDS}):
        text = f"{layer_types} has layers {', '.join(unknown)}, which are not supported"
        fields.note(RefusedField(text), **_CORRECTED)
    else:
        return tuple(types)
    return (FULL,)


def _read_mamba(fields: Fields) -> MambaSpec:
    heads = fields.integer("mamba_num_heads", 128)
    bias = fields.flag("use_bias", False)
    return MambaSpec(
        heads=heads,
        head=fields.integer("mamba_head_dim", 64),
        groups=read_groups(fields, ("n_groups", 8), mamba_num_heads=heads),
        vector=fields.integer("ssm_state_size", 128),
        kernel=fields.integer("conv_kernel", 4),
        activation=fields.activation("mamba_hidden_act", "silu"),
        # As in NVIDIA's own code, mlx-lm and vLLM; transformers has (time_step_min, infinity).
        time_steps=read_time_steps(fields),
        convolution_bias=fields.flag("use_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
    )


class Layer(nnx.Module):
    """Computes `x + mixer(norm(x))`.

    Attributes:
        norm: The norm.
        mixer: Mamba 2, attention or a feed-forward layer.
        keeps: True if the mixer has pages.
    """

    def __init__(self, spec: Spec, index: int, place: int, *, dtype: DTypeLike):
        """Makes the layer.

        Args:
            spec: The spec of the model.
            index: The layer's place in its model.
            place: The number of layers before it that have pages.
            dtype: The type of the parameters.
        """
        name = f"{spec.name}.layers.{index}"
        width = spec.hidden_size
        epsilon = spec.norm_epsilon
        self.norm = spec.form.norm(width, name=f"{name}.norm", epsilon=epsilon, dtype=dtype)
        kind = spec.types[index]
        self.keeps = kind != MLP
        name = f"{name}.mixer"
        if kind == LINEAR:
            assert isinstance(spec.recurrent, MambaSpec | Mamba1Spec)
            self.mixer: nnx.Module = make_mamba(
                spec.recurrent, place, width=width, epsilon=epsilon, name=name, dtype=dtype
            )
        elif kind == FULL:
            self.mixer = make_attention(spec, place, name=name, dtype=dtype)
        else:
            self.mixer = make_mlp(spec, name=name, dtype=dtype)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        normed_TD = self.norm(x_TD)
        if not self.keeps:
            return x_TD + self.mixer(normed_TD), layer_pages
        mixed_TD, layer_pages = self.mixer(normed_TD, layer_pages, context)
        return x_TD + mixed_TD, layer_pages


class Model(nnx.Module):
    """Computes the model; see `models.base.Model`."""

    def __init__(self, spec: Spec, *, dtype: DTypeLike):
        width = spec.hidden_size
        self.tokens, self.head = token_tables(
            spec.vocab_size,
            width,
            name=f"{spec.name}.embeddings",
            tied=spec.tie_word_embeddings,
            dtype=dtype,
        )
        has_pages = [kind != MLP for kind in spec.types]
        self.layers = nnx.List(
            Layer(spec, index, sum(has_pages[:index]), dtype=dtype)
            for index in range(len(has_pages))
        )
        self.norm = spec.form.norm(
            width, name=f"{spec.name}.norm_f", epsilon=spec.norm_epsilon, dtype=dtype
        )

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        of_layers = iter(pages)
        by_layer = tuple(next(of_layers) if layer.keeps else () for layer in self.layers)
        output_TD, by_layer, entering = run_layers(
            self.layers, self.norm, self.tokens(token_ids_T), by_layer, context
        )
        new_pages = zip(self.layers, by_layer, strict=True)
        return (
            output_TD,
            tuple(layer_pages for layer, layer_pages in new_pages if layer.keeps),
            entering,
        )

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits in float32."""
        return (self.head or self.tokens).logits(hidden_BD)
