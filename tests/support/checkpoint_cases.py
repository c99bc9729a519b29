"""Random checkpoints of all families: what config.json says and leaves out, and how the files lie.

A case begins with one of the configs of `model_configs`. Any field that its class in transformers
has may get another value, also a field that jaxpage does not read, and any field but the sizes may
be left out, so that the default of the class holds.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.family_names import FAMILY_OF
from tests.support.model_configs import MODELS, config_json

Config = dict[str, Any]

# The ways in which the same weights may lie in a directory.
FILES = ("shards", "numbered", "head", "prefixless", "stacked", "auto_map", "mark")
# Without these a class makes a model of billions of parameters.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "ffn_dim"),
    *("n_embd", "n_layer", "num_experts", "num_local_experts", "n_routed_experts"),
    *("num_attention_heads", "n_head", "experts_per_token", "num_experts_per_tok"),
    *("mamba_n_heads", "mamba_d_ssm", "shared_intermediate_size"),
    "pad_token_id",  # which has to be one of the vocabulary's
    *("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank"),
    *("moe_num_experts", "moe_k", "moe_topk", "d_model", "attention_heads", "num_layers"),
    *("num_heads", "attention_types", "rotary_dim", "n_layers", "n_heads"),
    *("intermediate_size_mlp", "vocab_size_per_layer_input"),
)
_FORM = ("architectures", "model_type", "text_config", "vision_config", "audio_config")
KEPT = (*_FORM, *SIZES)
# These change what a call of transformers returns or how it generates text, and no logits.
_IDLE = (
    *PreTrainedConfig().to_dict(),
    *("use_cache", "output_router_logits", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("text_config", "vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "add_cross_attention"),
    *("mamba_chunk_size", "chunk_size"),  # the order of transformers' sums
    "rescale_prenorm_residual",  # Mamba 2's class draws weights anew with it, stored ones too
)
_ACTIVATIONS = (
    *("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu"),
    *("gelu_fast", "swish", "tanh", "sigmoid", "mish", "gelu_python"),
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (61, 131),
    "hidden_size": (32, 48, 64),
    "n_embd": (32, 48),
    "intermediate_size": (24, 80),
    "num_hidden_layers": (1, 2, 3, 4),
    "n_layer": (1, 2, 3),
    "num_attention_heads": (2, 4, 6, 8),
    "n_head": (2, 4, 8),
    "num_key_value_heads": (None, 1, 2, 4, 8),
    "num_kv_heads": (None, 1, 2, 4),
    "head_dim": (None, 6, 8, 12, 16),
    "max_position_embeddings": (64, 128, 2048, 131_072),
    "n_positions": (64, 1024),
    "original_max_position_embeddings": (16, 32, 64),
    "sliding_window": (None, 1, 5, 9),
    "sliding_window_pattern": (1, 2, 3),
    "_sliding_window_pattern": (2, 3),
    "max_window_layers": (0, 1, 2, 28),
    "full_attention_interval": (1, 2, 3),
    "no_rope_layer_interval": (1, 2, 3),
    "decoder_sparse_step": (1, 2, 3),
    "first_k_dense_replace": (0, 1, 2),
    "n_shared_experts": (1, 2),
    "num_experts_per_tok": (1, 2, 3),
    "n_group": (None, 1, 2, 4),
    "topk_group": (None, 1, 2),
    "q_lora_rank": (None, 24),
    "moe_layer_freq": (1, 2),
    "index_topk": (64, 2048),
    "pretraining_tp": (1, 2),
    "num_nextn_predict_layers": (0, 1),
    "query_pre_attn_scalar": (9, 16.0, 256),
    "final_logit_softcapping": (None, 3.0, 30),
    "attn_logit_softcapping": (None, 2.0, 50),
    "clip_qkv": (None, 0.5),
    "logit_scale": (None, 0.25, 2),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "hidden_activation": (None, *_ACTIVATIONS),
    "n_inner": (None, 72),
    "ffn_hidden_size": (None, 72),
    "num_ln_in_parallel_attn": (None, 1, 2),
    "use_bidirectional_attention": (None, False, True),
    "attention_dropout": (0.0, 0.5),
    "num_local_experts": (0, 1, 3),
    "position_embedding_type": (None, "nope", "rope"),
    "time_step_limit": ([0.0, 0.4], [0.2, 1.5]),
    "mamba_n_heads": (2, 4, 8),
    "mamba_n_groups": (1, 2),
    **{"n_mamba_heads": (2, 4, 8), "mamba_ngroups": (1, 2), "mamba_dt_rank": ("auto", 3, 6)},
    "mamba_d_ssm": (None, 32, 96),
    "mlp_multipliers": (None, [0.5, 1.5]),
    "ssm_multipliers": (None, [0.9, 1.1, 0.8, 1.3, 0.7]),
    "attn_layer_indices": (None, [0], [1, 2]),
    "full_attn_idxs": (None, [], [0], [1, 2]),
    "block_ffn_dim_multiplier": (None, 0.5, 1.3),
    "block_multiple_of": (4, 8),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rope_theta": (100, 500.0, 1e6),
    "rope_local_base_freq": (100, 5000.0),
    **{"d_model": (32, 48), "attention_heads": (2, 4), "num_layers": (2,), "num_heads": (2, 4)},
    **{"moe_num_experts": (3, 4), "moe_k": (1, 2), "moe_topk": (1, 2)},
    **{"moe_num_shared_experts": (0, 1, 2), "moe_layer_end_index": (-1, 0, 1)},
    **{"moe_layer_start_index": (0, 1), "moe_norm_min": (1e-12, 1e-3), "rotary_dim": (4, 8)},
    **{"router_jitter_noise": (0.01, 0.3), "window_size": (3, 9), "n_ctx": (64, 128)},
    **{"attention_chunk_size": (None, 1, 5, 9), "moe_layers": (None, [], [0], [1, 2])},
    "attention_types": ([[["global", "local"], 1]], [[["local"], 2]]),
}
# Fields of published files that no class lists any more.
_OLDER = (
    *("rope_theta", "partial_rotary_factor", "head_dim", "hidden_activation", "layer_types"),
    *("sliding_window_pattern", "original_max_position_embeddings", "full_attention_interval"),
    *("moe_layer_freq", "scoring_func", "rope_local_base_freq", "attention_bias", "is_causal"),
)
_KINDS = {
    "layer_types": ("full_attention", "sliding_attention"),
    "mlp_layer_types": ("dense", "sparse"),
    "no_rope_layers": (0, 1),
    "layer_rope_theta": (0, 300.0, 10_000),
    "activation_sparsity_pattern": (0.0, 0.5, 0.95),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        base: The name of a config of `model_configs`.
        changed: Fields of the text model with other values.
        dropped: Fields that are left out.
        files: Names of `FILES`.
        seed: The seed of the weights.
        in_engine: Whether tokens of an engine are compared too.
    """

    base: str
    changed: dict[str, Any] = dataclasses.field(hash=False)
    dropped: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    seed: int = 0
    in_engine: bool = False

    @property
    def config(self) -> Config:
        """Returns what config.json says."""
        config = config_json(self.base)
        inner = text_of(config)
        inner |= copy.deepcopy(self.changed)
        for each in (config, inner):
            for name in self.dropped:
                each.pop(name, None)
        if "auto_map" in self.files:
            config["auto_map"] = {"AutoModelForCausalLM": "modeling_of_its_own.Model"}
        return config

    def program(self) -> str:
        """Returns a program that repeats the case from the root of the repository."""
        return f"""\
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.checkpoint_cases import Case
from tests.support.checkpoint_fuzzing import failure

case = {self!r}
print(case.config)
with TemporaryDirectory() as directory:
    print(failure(case, Path(directory)))
    input(f"The checkpoint is in {{directory}} until you press Enter")"""


def text_of(config: Config) -> Config:
    """Returns the part of a config that is the text model's."""
    inner: Config = config.get("text_config", config)
    return inner


@functools.cache
def text_class(model_type: str) -> Any:
    """Returns the config class of the text model.

    It is that of a config made without arguments: `sub_configs` names no class for models whose
    text may be of several families.
    """
    return type(CONFIG_MAPPING[model_type]().get_text_config())


@functools.cache
def class_fields(model_type: str) -> Config:
    """Returns the fields of a config class that may change logits, with their defaults."""
    fields = text_class(model_type)().to_dict()
    known = {name: value for name, value in fields.items() if name not in _IDLE}
    return {**dict.fromkeys(_OLDER), **known}


@functools.cache
def bases(family: str | None) -> dict[str, list[str]]:
    """Returns the names of `MODELS` by architecture, of one module of a family or of all."""
    names: dict[str, list[str]] = {}
    for name in MODELS:
        architecture = config_json(name)["architectures"][0]
        if family in (None, FAMILY_OF[architecture], architecture):
            names.setdefault(architecture, []).append(name)
    return names


def random_cases(rng: random.Random, family: str | None) -> Iterator[Case]:
    """Yields cases without an end, each architecture as often as the others."""
    architectures = bases(family)
    while True:
        order = [*architectures]
        rng.shuffle(order)
        for architecture in order:
            yield random_case(rng, architectures[architecture])


def random_case(rng: random.Random, names: list[str]) -> Case:
    """Returns a case that begins with one of these configs of one architecture."""
    base = rng.choice(names)
    model_type = config_json(base)["model_type"]
    inner = text_of(config_json(base))
    other = text_of(config_json(rng.choice(names)))
    fields = class_fields(model_type)
    changed: Config = {}
    if rng.random() < 0.3:
        changed |= {name: value for name, value in other.items() if rng.random() < 0.3}
    for name in rng.sample(sorted(fields), rng.choice((0, 1, 1, 2, 3, 5))):
        if name != "rope_parameters":
            default = inner.get(name, fields[name])
            changed[name] = random_value(rng, name, default, {**inner, **changed})
    if "rope_parameters" in fields and rng.random() < 0.4:
        changed |= random_rope(rng, {**inner, **changed}, fields["rope_parameters"])
    renamed = random_names(rng, model_type, {**inner, **changed})
    changed |= renamed
    left = [name for name in {**inner, **changed} if name not in (*KEPT, *renamed)]
    share = rng.choice((0, 0, 0.1, 0.3, 0.9))
    dropped = [name for name in left if rng.random() < share]
    # A field that goes by another name is not there twice.
    dropped += [_other_name(model_type, name) for name in renamed]
    changed_fields = {
        name: value for name, value in changed.items() if name not in (*_FORM, *dropped)
    }
    files = tuple(name for name in FILES if rng.random() < 0.12)
    seed = rng.randrange(2**31)
    return Case(base, changed_fields, tuple(dropped), files, seed, rng.random() < 0.06)


def random_value(rng: random.Random, name: str, default: Any, config: Config) -> Any:
    """Returns a value for a field, of the kind that its default is of."""
    num_layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 2)
    if name in _VALUES:
        return rng.choice(_VALUES[name])
    linear = {"linear_num_key_heads", "mamba_n_heads", "linear_num_heads", "linear_attn_config"}
    if name == "layer_types" and linear & config.keys():
        kinds: tuple[Any, ...] = ("full_attention", "linear_attention")
        return [rng.choice(kinds) for _ in range(num_layers)]
    if name == "layer_types" and "conv_L_cache" in config:
        return [rng.choice(("full_attention", "conv")) for _ in range(num_layers)]
    if name == "layer_types" and "attention_chunk_size" in config:
        return [rng.choice(("full_attention", "chunked_attention")) for _ in range(num_layers)]
    if name == "layers_block_type" and "n_mamba_heads" in config:
        return [rng.choice(("linear_attention", "mamba", "hybrid")) for _ in range(num_layers)]
    if name in _KINDS:
        return [rng.choice(_KINDS[name]) for _ in range(num_layers)]
    if name == "mlp_only_layers":
        return rng.choice(([], [0], [num_layers - 1]))
    if isinstance(default, bool) or name in ("attention_bias", "is_causal"):
        return rng.choice((True, False, None))
    if "eps" in name:
        return rng.choice((1e-6, 1e-5, 1e-3, 1e-2))
    if isinstance(default, str) and default in _ACTIVATIONS:
        return rng.choice(_ACTIVATIONS)
    if isinstance(default, float):
        return rng.choice((0.25, 0.5, 1, 1.5, 3.0))
    if isinstance(default, int):
        return rng.choice((1, 2, 3, 4))
    return default


def random_names(rng: random.Random, model_type: str, config: Config) -> Config:
    """Returns a few fields under the other names that their class has for them."""
    names = [name for name in config if _other_name(model_type, name) != name]
    return {_other_name(model_type, name): config[name] for name in names if rng.random() < 0.1}


def _other_name(model_type: str, name: str) -> str:
    kind = text_class(model_type)
    both = {**kind.attribute_map, **{value: key for key, value in kind.attribute_map.items()}}
    # A GLM config may say the width of its heads, which is no other name of a size. Zamba 2's class
    # counts the layers that have a block without the other name.
    is_same = name == "head_dim" or (model_type, name) == ("zamba2", "layers_block_type")
    return name if is_same else both.get(name, name)


def random_rope(rng: random.Random, config: Config, default: Config) -> Config:
    """Returns fields that say how positions turn queries and keys, in an old or the new form."""
    numbers = _random_rope_numbers(rng, config)
    fields: Config = {}
    if "full_attention" in default:
        if rng.random() < 0.5:
            both = {"full_attention": numbers, "sliding_attention": {"rope_type": "default"}}
            by_kind = {kind: each for kind, each in both.items() if rng.random() < 0.8}
            return {"rope_parameters": by_kind, "rope_scaling": None}
        return {"rope_parameters": None, "rope_scaling": numbers, "rope_theta": 300.0}
    if rng.random() < 0.3:
        numbers["type"] = numbers.pop("rope_type")
    if rng.random() < 0.15 and "original_max_position_embeddings" in numbers:
        fields["original_max_position_embeddings"] = numbers.pop("original_max_position_embeddings")
    if rng.random() < 0.2:
        factor = rng.choice(_VALUES["partial_rotary_factor"])
        rng.choice((fields, numbers))["partial_rotary_factor"] = factor
    if rng.random() < 0.5:
        theta = rng.choice(_VALUES["rope_theta"])
        rng.choice((fields, numbers))["rope_theta"] = theta
    form = rng.choice(("rope_scaling", "rope_parameters"))
    other = "rope_scaling" if form == "rope_parameters" else "rope_parameters"
    return {**fields, form: numbers, other: None}


def _random_rope_numbers(rng: random.Random, config: Config) -> Config:
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    width = width or config.get("hidden_size", 48) // (config.get("num_attention_heads") or 1)
    parameters = config.get("rope_parameters") or {}
    share = config.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1
    pairs = int(width * share) // 2
    length = rng.choice(_VALUES["original_max_position_embeddings"])
    factor = rng.choice((2, 4.0, 0.5))
    optional: dict[str, Callable[[], Any]] = {
        "attention_factor": lambda: 0.8,
        "beta_fast": lambda: rng.choice((4, 32.0)),
        "beta_slow": lambda: 0.5,
        "mscale": lambda: 0.7,
        "mscale_all_dim": lambda: rng.choice((0, 1.3)),
        "truncate": lambda: False,
        "original_max_position_embeddings": lambda: length,
    }
    more = {name: value() for name, value in optional.items() if rng.random() < 0.4}
    kinds: dict[str, Config] = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "llama3": {
            **{"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            **({"original_max_position_embeddings": length} if rng.random() < 0.8 else {}),
        },
        "yarn": {**more, **({"factor": factor} if rng.random() < 0.8 else {})},
        "longrope": {
            **{name: more[name] for name in more if name[0] in "ao"},
            "short_factor": [1 + index / 3 for index in range(pairs)],
            "long_factor": [4.0] * pairs,
        },
    }
    kind = rng.choice([*kinds])
    return {"rope_type": kind, **kinds[kind]}


def smaller_cases(case: Case) -> Iterator[Case]:
    """Yields cases that differ in one thing less from a config of `model_configs`."""
    if case.dropped:
        yield dataclasses.replace(case, dropped=())
    if case.changed:
        yield dataclasses.replace(case, changed={})
    for name in case.files:
        yield dataclasses.replace(case, files=tuple(each for each in case.files if each != name))
    for name in case.dropped:
        dropped = tuple(each for each in case.dropped if each != name)
        yield dataclasses.replace(case, dropped=dropped)
    for name in case.changed:
        changed = {each: value for each, value in case.changed.items() if each != name}
        yield dataclasses.replace(case, changed=changed)
        if isinstance(inner := case.changed[name], dict):
            for key in inner:
                fewer = {each: value for each, value in inner.items() if each != key}
                yield dataclasses.replace(case, changed={**case.changed, name: fewer})
