"""Plans an engine for an encoder, which has weights and a workspace, and no KV cache."""

from __future__ import annotations

from typing import Any

from jaxpage.assembly.planning.cache_groups import CacheGroup
from jaxpage.assembly.planning.described import Described
from jaxpage.assembly.planning.sizing import MemoryPlan
from jaxpage.device.inputs import stream_sizes
from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.models import EncoderConfig, ModelSpec
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.limits import StepLimits
from jaxpage.tables import gib

STREAM_ON_CPU = 512  # tokens; enough that products do not wait for weights
STREAM_ON_ACCELERATORS = 4096
# An encoder has no layer that keeps anything, and the scheduler has block tables without contents.
NO_CACHE = (CacheGroup((), None, 0, 0),)
# The settings that mean something to an encoder.
_HONOURED = frozenset(
    (
        *("model", "tokenizer", "revision", "load_format", "dtype", "max_model_len", "seed"),
        *("max_num_batched_tokens", "gpu_memory_utilization", "cudagraph_update_mode"),
        # These say how steps are computed, and an encoder without steps is served all the same.
        *("max_num_seqs", "block_size", "attention_backend", "enable_prefix_caching"),
    )
)


def is_encoder(model: ModelSpec) -> bool:
    """Returns whether a model is an encoder."""
    return isinstance(model, EncoderConfig)


def check_settings(config: EngineConfig, num_devices: int) -> None:
    """Refuses settings that an encoder cannot honour.

    Args:
        config: The settings.
        num_devices: The number of devices that is planned, which may be another one than that of
            the settings.

    Raises:
        UnsupportedError: There are such settings; the message names them with their values.
    """
    defaults: dict[str, Any] = {
        name: field.get_default(call_default_factory=True)
        for name, field in type(config).model_fields.items()
    }
    refused = [
        f"{name} = {value!r:.60}"
        for name in sorted(config.model_fields_set - _HONOURED)
        if (value := getattr(config, name)) != defaults[name]
    ]
    if num_devices > 1 and config.tensor_parallel_size != num_devices:
        refused.append(f"tensor_parallel_size = {num_devices}")
    if refused:
        raise UnsupportedError(
            f"{', '.join(refused)}: not supported for {config.model}, which is an encoder: it has "
            "no KV cache, no adapters and no steps, and runs on one device with the weights as "
            "they are"
        )


def no_steps(config: EngineConfig) -> StepLimits:
    """Returns limits for the scheduler of an engine that runs no step."""
    return StepLimits(config.max_num_seqs, max_tokens=1, max_chunk_rows=1, mixed=False)


def max_stream_tokens(described: Described) -> int:
    """Returns the tokens that several texts fill together, at most."""
    default = STREAM_ON_CPU if described.device.is_cpu else STREAM_ON_ACCELERATORS
    return described.config.max_num_batched_tokens or default


def encoder_sizes(described: Described) -> tuple[int, ...]:
    """Returns the numbers of tokens for which an encoder is compiled."""
    return stream_sizes(max_text_length(described), max_stream_tokens(described))


def max_text_length(described: Described) -> int:
    """Returns the tokens of the longest text."""
    positions = described.model.max_position_embeddings
    return described.config.max_model_len or min(positions, described.max_text or positions)


def plan_encoder_memory(described: Described) -> MemoryPlan:
    """Returns what of a device's memory an encoder takes.

    Raises:
        CapacityError: It does not fit; the message has the numbers.
    """
    device = described.device
    model = described.model
    tokens = encoder_sizes(described)[-1]
    wide = max(4 * model.hidden_size, getattr(model, "intermediate_size", 0))
    # Scores are made for a tile of 64 keys at a time; see `KEY_TILE` of `device/encoder_step.py`.
    scores = 3 * tokens * model.num_query_heads * 64
    workspace_bytes = 4 * (6 * tokens * wide + scores)
    plan = MemoryPlan(
        device=device.name,
        available_bytes=device.available_bytes,
        weights_bytes=described.weights_bytes,
        workspace_bytes=workspace_bytes,
        block_bytes=0,
        block_size=described.block_size,
        num_blocks=2,  # the null block and one more, without contents
        max_model_len=max_text_length(described),
    )
    if plan.free_bytes < 0:
        raise CapacityError(
            f"The weights take {gib(plan.weights_bytes)} and the workspace about "
            f"{gib(workspace_bytes)}, but {gib(plan.available_bytes)} are available on "
            f"{device.name}. Lower max_model_len or max_num_batched_tokens, or free memory."
        )
    return plan
