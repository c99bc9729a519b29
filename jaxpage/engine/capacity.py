"""How much fits: the division of a device's memory, for an engine that starts and for one that is only thought of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp

from jaxpage.config import EngineConfig, UnsupportedSettings
from jaxpage.device import kv_pages
from jaxpage.device.buckets import BucketMenu, make_menu
from jaxpage.device.sizing import MemoryPlan, available_bytes, choose_num_blocks
from jaxpage.errors import CapacityError, ConfigError
from jaxpage.models.base import KVSpec, ModelSpec

BATCHED_TOKENS_ON_CPU = 256  # keep a CPU busy
BATCHED_TOKENS_ON_ACCELERATORS = 2048
SCALE_BYTES = 4  # float32, one per slot and head for keys and one for values


@dataclass(frozen=True)
class Place:
    """The device that an engine runs on, or one that somebody has in mind."""

    name: str  # begins with the platform
    available_bytes: int

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")


@dataclass(frozen=True)
class Form:
    """How a model is kept: its numbers in which types, on how many devices. The fields are settings."""

    dtype: str  # never "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


def place_of(device: jax.Device, utilization: float) -> Place:
    return Place(f"{device.platform} ({device.device_kind})", available_bytes(device, utilization))


def choose_dtype(config: EngineConfig, place: Place, stored: str) -> str:
    """ "auto" follows the checkpoint, but on CPU everything runs in float32, where XLA's bfloat16 products are many times slower."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if place.is_cpu else stored


def step_menu(config: EngineConfig, place: Place) -> BucketMenu:
    num_tokens = config.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = BATCHED_TOKENS_ON_CPU if place.is_cpu else BATCHED_TOKENS_ON_ACCELERATORS
    return make_menu(config.max_num_seqs, max(num_tokens, 2))


def plan_memory(config: EngineConfig, spec: ModelSpec, place: Place, form: Form, weights_bytes: int) -> MemoryPlan:
    """What one device holds. Of `form`'s devices each has its part of the weights and its heads of every block.

    Args:
        weights_bytes: of the whole model, in `form.dtype`.

    Raises:
        ConfigError: `max_model_len` is beyond the model's positions, or the heads cannot be divided among the devices.
        CapacityError: the weights leave no room, or one sequence of `max_model_len` does not fit; with the numbers.
    """
    longest = spec.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's positions end at {longest}")
    kv = replace(spec.kv, num_kv_heads=kv_heads_per_device(spec, form.tensor_parallel_size))
    plan = MemoryPlan(
        device=place.name,
        available_bytes=place.available_bytes,
        weights_bytes=-(-weights_bytes // form.tensor_parallel_size),
        workspace_bytes=_workspace_estimate(spec.vocab_size, spec.model_width, step_menu(config, place)),
        block_bytes=_block_bytes(kv, config.block_size, form),
        block_size=config.block_size,
        num_blocks=0,
        max_model_len=config.max_model_len or longest,
    )
    plan = choose_num_blocks(
        plan, wanted=config.num_blocks, pool_bytes=config.kv_cache_memory_bytes, max_num_seqs=config.max_num_seqs
    )
    if plan.num_slots >= plan.max_model_len:
        return plan
    if config.max_model_len is not None:
        raise CapacityError(
            f"One sequence of max_model_len = {plan.max_model_len} tokens does not fit in the KV pool of {plan.num_slots} slots "
            f"({plan.num_blocks - 1} blocks of {plan.block_size}). Lower max_model_len to {plan.num_slots} or less, or raise "
            "num_blocks or kv_cache_memory_bytes."
        )
    return replace(plan, max_model_len=plan.num_slots)


def kv_heads_per_device(spec: ModelSpec, num_devices: int) -> int:
    """Key/value heads of each device: its share, or one of which several devices keep a copy. Raises ConfigError if neither goes."""
    num_query_heads, num_kv_heads = spec.num_query_heads, spec.kv.num_kv_heads
    if num_query_heads % num_devices:
        raise ConfigError(f"{num_devices} devices cannot share {num_query_heads} query heads evenly")
    if num_kv_heads % num_devices and num_devices % num_kv_heads:
        raise ConfigError(f"{num_devices} devices cannot share {num_kv_heads} key/value heads evenly")
    return max(1, num_kv_heads // num_devices)


def refused_settings(config: EngineConfig, form: Form) -> tuple[str, ...]:
    """The settings that keep this version from running a model in that form. Raises ConfigError for what is no form at all."""
    try:
        config.replace(**asdict(form))
    except UnsupportedSettings as error:
        return tuple(name for name, _ in error.problems)
    return ()


def _block_bytes(kv: KVSpec, block_size: int, form: Form) -> int:
    if form.kv_cache_dtype == "auto":
        return kv_pages.bytes_per_block(kv, block_size, form.dtype)
    scales = 2 * kv.num_layers * block_size * kv.num_kv_heads * SCALE_BYTES
    return kv_pages.bytes_per_block(kv, block_size, jnp.int8) + scales  # fp8 has eight bits too


def _workspace_estimate(vocab_size: int, width: int, menu: BucketMenu) -> int:
    """Before compilation: logits with what sampling makes of them, and a dozen activations of the widest step, in float32."""
    rows = max(bucket.num_rows for bucket in menu.buckets)
    tokens = max(bucket.num_tokens for bucket in menu.buckets)
    return 4 * (6 * rows * vocab_size + 24 * tokens * width)
