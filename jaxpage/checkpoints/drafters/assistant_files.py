"""Opens Gemma 4's assistants from headers alone, fits them to their target, and loads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.checkpoints.config_file import check_config
from jaxpage.checkpoints.drafters.token_map import read_token_map
from jaxpage.checkpoints.files import read_object_if_there
from jaxpage.checkpoints.fitting import LoadPlan, fit_stored
from jaxpage.checkpoints.loading import load_weights
from jaxpage.checkpoints.opening import ModelFiles, check_spec
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_files import read_tensors
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models import KVSpec, load_family
from jaxpage.models.drafters import AssistantSpec, Centroids, find_target_layers, follow_target
from jaxpage.models.parameters import weights_of

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
TOKEN_ORDER = "masked_embedding.token_ordering"
# What absent fields mean, by the model_type of the layers, which are alike in both.
_DEFAULTS = {
    "gemma4_text": {"backbone_hidden_size": 1536},
    "gemma4_unified_text": {"backbone_hidden_size": 3840, "sliding_window": 1024},
}
# With other values than these the layers would be of another form.
_FIXED = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
# Published files may have them, but the layers read the target's keys and values.
_IGNORED = tuple(
    f"model.layers.*.self_attn.{part}.*" for part in ("k_proj", "v_proj", "k_norm", "v_norm")
)


@dataclass(frozen=True)
class AssistantFiles:
    """Holds an assistant that fits its target. Only headers and the token order have been read.

    Attributes:
        spec: The spec of the assistant.
        plan: The tensors that fill its parameters.
        token_order: The tokens, group by group; None for a head without groups.
    """

    spec: AssistantSpec
    plan: LoadPlan
    token_order: npt.NDArray[np.int32] | None

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of the assistant in a model of this type."""
        order = self.token_order
        return self.plan.num_bytes(dtype) + (0 if order is None else order.nbytes)


def is_assistant(directory: Path) -> bool:
    """Returns whether config.json is that of an assistant; False where it cannot be read."""
    try:
        config = read_object_if_there(directory, "config.json")
    except CheckpointError:
        return False
    return config is not None and config.get("model_type") in MODEL_TYPES


def open_assistant(directory: Path, target: ModelFiles) -> AssistantFiles:
    """Opens an assistant.

    Raises:
        CheckpointError: The assistant does not fit; the error lists all that is wrong.
        UnsupportedError: The target is of another family than Gemma 4.
    """
    family: Any = load_family({"architectures": ["Gemma4ForCausalLM"]})
    if not isinstance(target.spec, family.Spec):
        raise UnsupportedError(
            f"the assistant in {directory} reads the keys and values of a Gemma 4 model, and the "
            f"model in {target.directory} is of another family; use a draft model with layers of "
            "its own"
        )
    problems = Problems(directory)
    config = check_config(directory, problems)
    stored = read_tensors(directory, problems)
    spec = _spec(config, family, target, problems) if config else None
    order_info = stored.pop(TOKEN_ORDER, None)
    plan = LoadPlan(directory, "safetensors")
    token_order = None
    if spec is not None:
        if spec.centroids is not None:
            token_order = _read_order(order_info, spec.decoder.vocab_size, problems)
        is_tied = spec.decoder.tie_word_embeddings
        ignored = _IGNORED if is_tied else (*_IGNORED, "model.embed_tokens.weight")
        plan = fit_stored(plan, stored, weights_of(spec.make("float32")), ignored, problems)
    problems.raise_if_any()
    assert spec is not None
    return AssistantFiles(spec, plan, token_order)


def load_assistant(
    files: AssistantFiles, dtype: str, put: Callable[[np.ndarray], Any], *, progress: bool = False
) -> dict[str, Any]:
    """Returns the parameters as `models.drafters.join` takes them, each one `put(array)`."""
    parameters = {"tokens": None, **load_weights(files.plan, dtype, put, progress=progress)}
    order = files.token_order
    return parameters if order is None else {**parameters, "token_order": put(order)}


def _spec(
    config: Mapping[str, Any], family: Any, target: ModelFiles, problems: Problems
) -> AssistantSpec | None:
    """Returns the spec; None if something is wrong, which is then in `problems`."""
    kind = config.get("model_type", "gemma4_text")
    if kind not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        problems.add(f"config.json: text_config.model_type is {quote(kind)}, not one of {known}")
        return None
    config = {**_DEFAULTS[kind], **config, "model_type": "gemma4_text"}
    for name, value in _FIXED.items():
        if (stated := config.get(name, value)) != value:
            problems.add(f"config.json: {name} is {quote(stated)}, and must be {value}")
    layers = config.get("num_hidden_layers")
    if config.get("num_kv_shared_layers") not in (None, 0, layers):
        stated = quote(config["num_kv_shared_layers"])
        problems.add(
            f"config.json: num_kv_shared_layers is {stated}, and must be num_hidden_layers, {layers}"
        )
    # The family takes no 0 rows, and without such inputs their number does not matter.
    usual = {"num_kv_shared_layers": 0, **_FIXED, "vocab_size_per_layer_input": 1}
    described: Any = check_spec(family, {**config, **usual}, problems)
    centroids = _centroids(config, problems)
    if described is None:
        return None
    model: Any = target.spec
    for name, stated, expected in (
        ("vocab_size", described.vocab_size, model.vocab_size),
        ("backbone_hidden_size", config.get("backbone_hidden_size"), model.hidden_size),
    ):
        if stated != expected:
            problems.add(f"config.json: {name} is {quote(stated)}, but the model's is {expected}")
    places = _fit_layers(described.kv, model.kv, problems)
    if not any(filled.weight.path == ("tokens", "table") for filled in target.plan.parameters):
        problems.add(
            "it takes embeddings of the model, whose token table is in few bits: leave out "
            "quantization"
        )
    if places is None:
        return None
    return AssistantSpec(
        decoder=follow_target(described, model, places),
        first_layer=len(model.layer_forms),
        target_width=model.hidden_size,
        centroids=centroids,
    )


def _fit_layers(kv: KVSpec, target_kv: KVSpec, problems: Problems) -> tuple[int, ...] | None:
    """Returns the target's layer whose pages each layer reads; None if one fits none of them.

    Args:
        kv: What the layers would keep, had they keys and values of their own.
        target_kv: What the target keeps.
        problems: The list that errors are added to.
    """
    all_places = find_target_layers(target_kv, kv.sliding_windows)
    places = tuple(place for place in all_places if place is not None)
    for layer, place in enumerate(all_places):
        window = kv.sliding_windows[layer]
        kind = "with a window" if window else "without a window"
        if place is None:
            problems.add(
                f"config.json: layer {layer} is one {kind}, of which the model has none with keys"
            )
            continue
        for quantity, stated, expected in (
            ("key/value heads and their width", kv.heads_of(layer), target_kv.heads_of(place)),
            ("sliding_window", window, target_kv.sliding_windows[place]),
        ):
            if stated != expected:
                problems.add(
                    f"config.json: in layers {kind}, as layer {layer}, {quantity} are {stated}, but "
                    f"{expected} in the model"
                )
    return places if len(places) == len(all_places) else None


def _centroids(config: Mapping[str, Any], problems: Problems) -> Centroids | None:
    """Returns the groups of tokens of the head; None if it has none."""
    has_groups = config.get("use_ordered_embeddings", False)
    if not isinstance(has_groups, bool):
        problems.add(
            f"config.json: use_ordered_embeddings must be true or false, not {quote(has_groups)}"
        )
    if has_groups is not True:
        return None
    count = config.get("num_centroids", 2048)
    chosen = config.get("centroid_intermediate_top_k", 32)
    rows = config.get("vocab_size")
    is_right = all(type(number) is int and number > 0 for number in (count, chosen, rows))
    if not is_right or chosen > count or rows % count:
        problems.add(
            f"config.json: num_centroids, {quote(count)}, must divide vocab_size, {quote(rows)}, "
            f"and be at least centroid_intermediate_top_k, {quote(chosen)}"
        )
        return None
    return Centroids(count, chosen)


def _read_order(
    info: TensorInfo | None, vocab_size: int, problems: Problems
) -> npt.NDArray[np.int32] | None:
    """Returns the tokens group by group; None, with the reason in `problems`, if there are none."""
    if info is None or info.shape != (vocab_size,):
        shape = "missing" if info is None else f"of shape {info.shape}"
        problems.add(
            f"tensor {TOKEN_ORDER!r} is {shape}, and must have one number for each of "
            f"{vocab_size} tokens"
        )
        return None
    return read_token_map(info, vocab_size, problems)
