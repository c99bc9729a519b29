"""Refuses settings that layers with sliding windows, or recurrent layers, do not take."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.assembly.planning.described import Described, ModelLayout
from jaxpage.errors import UnsupportedError
from jaxpage.models import KVSpec
from jaxpage.settings.speculative_config import SpeculativeConfig


def check_recurrent(
    model: str, kv: KVSpec, layout: ModelLayout, drafters: Iterable[KVSpec] = ()
) -> None:
    """Checks settings for recurrent layers.

    Args:
        model: The name of the model, for the message.
        kv: The KV cache of the model's layers.
        layout: The types of the model's numbers.
        drafters: The KV caches of a drafter's layers.

    Raises:
        UnsupportedError: Recurrent layers do not take a setting.
    """
    if any(any(each.states) for each in drafters):
        raise UnsupportedError(
            "speculative_config: a draft model with recurrent layers is not supported; use one "
            "without, or a method "
            "that drafts without a model"
        )
    if not any(kv.states):
        return
    if layout.kv_cache_dtype != "auto":
        raise UnsupportedError(
            f"kv_cache_dtype {layout.kv_cache_dtype!r} is not supported for {model}, which has "
            "recurrent layers: their states "
            "are kept in float32, and their inputs in the model's dtype; use 'auto'"
        )


def check_batch_invariant(described: Described) -> None:
    """Checks settings for `batch_invariant` on a GPU.

    Raises:
        UnsupportedError: With a setting, sums of floats would be left to XLA, or a token's keys
            would not be at their positions.
    """
    config = described.config
    if not config.batch_invariant or described.device.is_cpu:
        return
    drafts = config.speculative_config
    vectors = described.vectors
    problems = {
        "enable_lora: XLA adds up the products with adapters; leave it out": config.enable_lora,
        "speculative_config: the keys of a tree of drafts are not at their positions; use "
        "tree=False and a method of chains": drafts is not None and drafts.branches,
        f"acceptance {config.acceptance.name!r}: XLA adds up the probabilities of drafts; use "
        "coupled": drafts is not None and config.acceptance.name != "coupled",
        "limit_images: XLA adds up in the encoder of pictures; set it to 0": vectors is not None
        and vectors.vision is not None,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise UnsupportedError(f"batch_invariant with {problem}, or leave batch_invariant out")


def refuse_recurrent(program: str, kv: KVSpec) -> None:
    """Refuses recurrent layers for a program that counts only keys and values.

    Args:
        program: The name of the program.
        kv: The KV cache of the model's layers.

    Raises:
        UnsupportedError: The model has recurrent layers.
    """
    if any(kv.states):
        raise UnsupportedError(
            f"{program} is not supported for a model with recurrent layers: it knows keys and "
            "values alone"
        )


def check_windows(config: SpeculativeConfig | None, model: str, kvs: Iterable[KVSpec]) -> None:
    """Checks that drafts do not branch if layers have sliding windows or states.

    Attention takes a tree or a sliding window, but not both, and the states of recurrent layers
    follow no branches.

    Args:
        config: The settings of speculation, if there are any.
        model: The name of the model, for the message.
        kvs: The KV caches of the model's and a drafter's layers.

    Raises:
        UnsupportedError: Drafts branch, and a layer has a window or a state.
    """
    if (
        config is None
        or not config.branches
        or not any(any(kv.sliding_windows) or any(kv.states) for kv in kvs)
    ):
        return
    feature, instead = (
        ("tree=True", "tree=False")
        if config.tree
        else (f"method {config.method!r}", "a method of chains")
    )
    raise UnsupportedError(
        f"speculative_config: {feature} is not supported for {model}: its layers, or those of what "
        "drafts for it, have sliding "
        f"windows or states; use {instead}"
    )
