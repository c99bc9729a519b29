"""Makes whole steps of a model from shapes alone, for a compiler: no weights, memory or device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.checkpoints.quantization.scheme_choice import quantization_of
from jaxpage.device.executables import step_call
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.hardware.mesh import make_mesh
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import TableShape
from jaxpage.device.pages.kv_pages import page_dtype, page_shapes
from jaxpage.device.steps import StepOptions
from jaxpage.models.base import abstract_model
from jaxpage.models.registry import load_family

# The part of config.json of meta-llama/Meta-Llama-3-8B that gives shapes.
LLAMA_3_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

QWEN3_30B_A3B: Mapping[str, Any] = {  # Qwen/Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

# DeepSeek and Qwen use these blocks.
FP8_BLOCKS: Mapping[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}

ON_TPU = Backend("auto", interleaved=True)  # what `choose_backend` makes of "auto" on a TPU
BUCKETS = {
    "decode": Bucket(num_tokens=16, num_rows=16, max_query_len=1),
    "verify": Bucket(num_tokens=128, num_rows=16, max_query_len=8, verifies=True),
    "decode of 64": Bucket(num_tokens=64, num_rows=64, max_query_len=1),
    "several steps": Bucket(num_tokens=64, num_rows=16, max_query_len=4, num_steps=4),
    "chunk": Bucket(num_tokens=2048, num_rows=16, max_query_len=2048),
}


@dataclass(frozen=True)
class StepShapes:
    """A jitted step and the shapes of its arguments; the second, the pages, is donated."""

    step: Any
    arguments: tuple[Any, ...]
    num_layers: int

    @property
    def pages_bytes(self) -> int:
        """Returns the bytes of the pages of all layers, scales included."""
        return sum(_bytes(leaf) for leaf in jax.tree.leaves(self.arguments[1]))

    @property
    def array_bytes(self) -> int:
        """Returns the bytes of the largest array of the pool: one layer's keys, or its values."""
        return max(_bytes(leaf) for leaf in jax.tree.leaves(self.arguments[1]))


def step_shapes(
    bucket: Bucket,
    *,
    backend: str | Backend,
    config: Mapping[str, Any] = LLAMA_3_8B,
    num_layers: int | None = None,
    num_blocks: int = 16384,
    block_size: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    quantization: str | Mapping[str, Any] | None = None,
) -> StepShapes:
    """Returns the step that an engine compiles for a bucket on a GPU.

    The arguments that are not described here are those of `EngineConfig`.

    Args:
        bucket: The bucket.
        backend: The kernel set, or what `choose_backend` made of its name.
        config: The content of config.json.
        num_layers: A smaller number of layers than the config has, to compile faster.
        num_blocks: The blocks of the pool, the null block included.
        block_size: The slots of a block.
        dtype: The type of the weights.
        kv_cache_dtype: The type of the pages.
        quantization: The setting of `EngineConfig`, or config.json's quantization_config.
    """
    backend = Backend(backend) if isinstance(backend, str) else backend
    if num_layers is not None:
        config = {**config, "num_hidden_layers": num_layers}
    family = load_family(config)
    spec = family.Spec.from_config(config)
    stored = {"quantization_config": quantization} if isinstance(quantization, Mapping) else {}
    scheme = quantization_of(stored, quantization if isinstance(quantization, str) else None)
    graph, parameters = abstract_model(
        family, spec, jnp.dtype(dtype), None if scheme is None else scheme.rule
    )
    table_width = -(-spec.max_position_embeddings // block_size)
    options = StepOptions(
        graph=graph,
        vocab_size=spec.vocab_size,
        context=table_width * block_size,
        tables=TableShape(1, table_width),
        layer_groups=(0,) * spec.kv.num_layers,
        attention_backend=backend,
        sample_by_row=False,
    )
    pages = page_shapes(
        spec.kv,
        num_blocks,
        block_size,
        page_dtype(kv_cache_dtype, dtype),
        interleaved=backend.interleaved,
    )
    parameters_by_model = {"target": parameters, "drafter": None}
    step, others = step_call(parameters_by_model, pages, bucket, options, make_mesh())
    return StepShapes(step, (parameters_by_model, pages, *others), spec.kv.num_layers)


def _bytes(leaf: Any) -> int:
    return int(math.prod(leaf.shape)) * int(leaf.dtype.itemsize)
