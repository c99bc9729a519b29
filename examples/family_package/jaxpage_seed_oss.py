"""Seed-OSS (ByteDance Seed, 2025): Llama with a bias on queries, keys and values, and one on the output of attention by choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models import llama
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import RotaryDecoderSpec

prefix, ignored = llama.prefix, llama.ignored
Model = llama.Model


class Spec:
    """`SeedOssConfig`. Dropout and `pretraining_tp` mean nothing here."""

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> RotaryDecoderSpec:
        defaults = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288}
        as_llama = {**defaults, **config, "model_type": "llama", "attention_bias": False}
        # its end raises all that is wrong, here and in Llama's
        with Fields(config, "seed_oss") as fields:
            on_input = fields.flag("attention_bias", True)
            on_output = fields.flag("attention_out_bias", False)
            llamas = llama.Spec.from_config(as_llama)
            return replace(llamas, attention_input_bias=on_input, attention_output_bias=on_output)
