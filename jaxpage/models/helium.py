"""Helium (Kyutai, 2025) is Llama that rotates interleaved."""

from __future__ import annotations

from jaxpage.models.config.config_fields import RefusedField
from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults


class HeliumConfig(DecoderConfig):
    """Reads transformers' `HeliumConfig`."""

    model_type = "helium"
    defaults = Defaults(
        num_kv_heads=20,
        max_length=4096,
        theta=100_000.0,
        interleaved=True,
        epsilon=1e-8,
        attention_bias=False,
        mlp_bias=False,
    )

    @classmethod
    def read(cls, fields: Fields) -> HeliumConfig:
        """Returns what the fields say."""
        head_dim = fields.integer("head_dim", 128)
        usual = fields.divide("hidden_size", "num_attention_heads")
        if head_dim != usual:
            text = f"head_dim = {head_dim} is not hidden_size / num_attention_heads = {usual}"
            fields.note(RefusedField(text), head_dim=usual)
        return cls.from_fields(fields, head_dim=usual)


class Helium(Llama, config=HeliumConfig):
    """Helium (Kyutai, 2025) is Llama that rotates interleaved."""

    output_bias = False
