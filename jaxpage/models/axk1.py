"""A.X K1 (SK Telecom, 2025) is DeepSeek-V3 with a norm after the experts of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.block_form import LLAMA_FORM
from jaxpage.models.deepseek_v3 import (
    first_dense,
    latent_knobs,
    read_corrected_experts,
    sparse_by_type,
)
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, prefix

__all__ = ["Model", "Spec", "ignored", "prefix", "renamed"]

Model = RotaryDecoder
NORM = "post_mlp_layernorm"
REFUSAL = "heads of A.X K1 are not read"
FORM = dataclasses.replace(LLAMA_FORM, norms=(*LLAMA_FORM.norms[:3], NORM))
# Published files have this norm in all layers; transformers uses it only in layers with experts.
ignored = (*rotary_decoder.ignored, f"*.{NORM}.weight")
renamed = {f".{NORM}": f".mlp.{NORM}"}  # the name that transformers has in memory


class Spec(RotaryDecoderSpec):
    """Reads transformers' `AXK1Config`.

    The router has a correction bias only if `topk_method` is `noaux_tc` or absent. transformers
    does not read this field: where files have no bias, it takes zeros.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "axk1", {"n_routed_experts": "num_local_experts"}) as fields:
            heads = read_numbered_names(fields)
            sparse = sparse_by_type(fields, first_dense(fields, 1))
            return cls._from_fields(
                fields,
                experts=read_corrected_experts(
                    fields,
                    count=192,
                    per_token=8,
                    width=2048,
                    groups=(8, 4),
                    factor=2.5,
                    corrected=fields.get("topk_method", "noaux_tc") == "noaux_tc",
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=sparse,
                form_by_layer=tuple(FORM if each else LLAMA_FORM for each in sparse),
                draft_heads=heads and dataclasses.replace(heads, refusal=REFUSAL),
                **latent_knobs(fields, longest=32_768, query_rank=1536),
            )
