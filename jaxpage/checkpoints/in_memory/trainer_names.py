"""Gives weights under the names of JAX trainers those of Hugging Face.

The trainers are MaxText, Tunix and the library gemma of Google DeepMind, for Llama, Qwen and Gemma:

    MaxText, scanned    decoder.layers.mlp.wi_0.kernel        [D, layers, F]
    MaxText             decoder.layers_3.mlp.wi_0.kernel      [D, F]
    Tunix               layers.3.mlp.gate_proj.kernel         [D, F]
    gemma               layer_3/mlp/gating_einsum             [2, F, D], gates and ups
    Hugging Face        model.layers.3.mlp.gate_proj.weight   [F, D]

There is a table for each trainer: a name, the one of Hugging Face, and how the numbers get there.
What is in no table keeps its name, so that it is reported as every unknown tensor is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpage.errors import UnsupportedError

# The token table, by which a trainer is known. What its name begins with is left out of all names.
MARKS = {"MaxText": "token_embedder.embedding", "Tunix and gemma": "embedder.input_embedding"}
FAMILIES = {
    **{"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen", "Qwen3ForCausalLM": "qwen"},
    **{"Qwen3MoeForCausalLM": "qwen", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2"},
    **{"Gemma3ForCausalLM": "gemma3", "Gemma3ForConditionalGeneration": "gemma3"},
}
GEMMA3_PERIOD = 6  # MaxText scans over as many layers of Gemma 3 at once.


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a model that decide where its numbers go."""

    num_layers: int
    vocab_size: int
    hidden_size: int
    head_dim: int


Turn = Callable[[Any, Sizes], Any]
Row = tuple[str, str, Turn]


def _same(x: Any, sizes: Sizes) -> Any:
    return x


def _flat(x: Any, sizes: Sizes) -> Any:
    return x.reshape(-1)


def _input_first(x: Any, sizes: Sizes) -> Any:
    """Returns the weight of a product [in, ...out]."""
    return x.reshape(x.shape[0], -1).T


def _output_last(x: Any, sizes: Sizes) -> Any:
    """Returns the weight of a product [...in, out]."""
    return x.reshape(-1, x.shape[-1]).T


def _heads(x: Any, sizes: Sizes) -> Any:
    """Returns the weight of a product [heads, in, head width]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1])


def _part(index: int, turn: Turn) -> Turn:
    return lambda x, sizes: turn(x[index], sizes)


def _inner(x: Any, sizes: Sizes) -> Any:
    """Returns the weight of gates or ups, of which gemma has both orders."""
    if x.shape[0] == x.shape[1]:
        raise UnsupportedError(
            f"a gating_einsum of {x.shape[0]} by {x.shape[1]} does not show which axis is the "
            "input's"
        )
    return x.T if x.shape[0] == sizes.hidden_size else x


def _less_one(x: Any, sizes: Sizes) -> Any:
    return (x - 1).astype(x.dtype)


def _head(x: Any, sizes: Sizes) -> Any:
    return x.T[: sizes.vocab_size]


def _tokens(x: Any, sizes: Sizes) -> Any:
    """Returns the token table without the rows that fill it up."""
    return x[: sizes.vocab_size]


def _tokens_over(divisor: Callable[[float], Any]) -> Turn:
    """Returns what takes the factor of Gemma's embeddings out of the token table."""
    return lambda x, sizes: (
        _tokens(x, sizes).astype(np.float32) / np.float32(divisor(sizes.hidden_size**0.5))
    ).astype(x.dtype)


def _in_halves(x: Any, sizes: Sizes) -> Any:
    """Returns the weight of heads whose pairs, to be turned, were neighbours."""
    paired = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2)
    return _input_first(paired.reshape(x.shape), sizes)


def _remove_scale(turn: Turn) -> Turn:
    """Returns what takes the factor of the scores out of queries."""
    return lambda x, sizes: turn(
        (x.astype(np.float32) * np.float32(sizes.head_dim**0.5)).astype(x.dtype), sizes
    )


def _maxtext(query: Turn, key: Turn, *, tokens: Turn = _tokens) -> tuple[Row, ...]:
    """Returns the table of MaxText for Llama and Qwen."""
    return (
        ("token_embedder.embedding", "embed_tokens.weight", tokens),
        ("decoder.decoder_norm.scale", "norm.weight", _same),
        ("decoder.logits_dense.kernel", "lm_head.weight", _head),
        ("pre_self_attention_layer_norm.scale", "input_layernorm.weight", _same),
        ("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", _same),
        ("self_attention.query.kernel", "self_attn.q_proj.weight", query),
        ("self_attention.key.kernel", "self_attn.k_proj.weight", key),
        ("self_attention.value.kernel", "self_attn.v_proj.weight", _input_first),
        ("self_attention.out.kernel", "self_attn.o_proj.weight", _output_last),
        ("self_attention.query.bias", "self_attn.q_proj.bias", _flat),
        ("self_attention.key.bias", "self_attn.k_proj.bias", _flat),
        ("self_attention.value.bias", "self_attn.v_proj.bias", _flat),
        ("self_attention.query_norm.scale", "self_attn.q_norm.weight", _same),
        ("self_attention.key_norm.scale", "self_attn.k_norm.weight", _same),
        ("mlp.wi_0.kernel", "mlp.gate_proj.weight", _input_first),
        ("mlp.wi_1.kernel", "mlp.up_proj.weight", _input_first),
        ("mlp.wo.kernel", "mlp.down_proj.weight", _input_first),
        ("moe_block.gate.kernel", "mlp.gate.weight", _input_first),
        ("moe_block.wi_0", "mlp.experts.{}.gate_proj.weight", _input_first),
        ("moe_block.wi_1", "mlp.experts.{}.up_proj.weight", _input_first),
        ("moe_block.wo", "mlp.experts.{}.down_proj.weight", _input_first),
    )


def _maxtext_gemma(query: Turn, tokens: Turn) -> tuple[Row, ...]:
    """Returns the table of MaxText for Gemma, whose norms it stores with the one."""
    common = _maxtext(query, _input_first, tokens=tokens)
    rows = [(name, to, _less_one if name.endswith("scale") else turn) for name, to, turn in common]
    return (
        *rows,
        ("pre_self_attention_norm.scale", "input_layernorm.weight", _less_one),
        ("post_self_attention_norm.scale", "post_attention_layernorm.weight", _less_one),
        ("pre_ffw_norm.scale", "pre_feedforward_layernorm.weight", _less_one),
        ("post_ffw_norm.scale", "post_feedforward_layernorm.weight", _less_one),
    )


# Tunix has for Llama and Qwen the modules of Hugging Face.
_TUNIX: tuple[Row, ...] = (
    ("embedder.input_embedding", "embed_tokens.weight", _same),
    ("final_norm.w", "norm.weight", _same),
    ("lm_head.w", "lm_head.weight", _input_first),
    *(
        (f"{norm}.w", f"{norm}.weight", _same)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ),
    *((f"attn.{x}_norm.w", f"self_attn.{x}_norm.weight", _same) for x in "qk"),
    *((f"attn.{x}_proj.w", f"self_attn.{x}_proj.weight", _input_first) for x in "qkv"),
    *((f"attn.{x}_bias", f"self_attn.{x}_proj.bias", _flat) for x in "qkv"),
    ("attn.o_proj.w", "self_attn.o_proj.weight", _output_last),
    *(
        (f"mlp.{x}_proj.kernel", f"mlp.{x}_proj.weight", _input_first)
        for x in ("gate", "up", "down")
    ),
)


def _gemma(norms: Mapping[str, str]) -> tuple[Row, ...]:
    """Returns the table of gemma, and of Tunix for Gemma; `norms` of the feed-forward half."""
    qkv = enumerate("qkv")
    return (
        ("embedder.input_embedding", "embed_tokens.weight", _same),
        ("final_norm.scale", "norm.weight", _same),
        ("pre_attention_norm.scale", "input_layernorm.weight", _same),
        *((f"{name}.scale", f"{to}.weight", _same) for name, to in norms.items()),
        ("attn._query_norm.scale", "self_attn.q_norm.weight", _same),
        ("attn._key_norm.scale", "self_attn.k_norm.weight", _same),
        ("attn.q_einsum.w", "self_attn.q_proj.weight", _heads),
        ("attn.kv_einsum.w", "self_attn.k_proj.weight", _part(0, _heads)),
        ("attn.kv_einsum.w", "self_attn.v_proj.weight", _part(1, _heads)),
        # Gemma's code has one product for all three where each query head has a KV head of its own.
        *(
            ("attn.qkv_einsum.w", f"self_attn.{x}_proj.weight", _part(index, _heads))
            for index, x in qkv
        ),
        ("attn.attn_vec_einsum.w", "self_attn.o_proj.weight", _output_last),
        *(
            row
            for end in ("", ".w")
            for row in (
                (f"mlp.gating_einsum{end}", "mlp.gate_proj.weight", _part(0, _inner)),
                (f"mlp.gating_einsum{end}", "mlp.up_proj.weight", _part(1, _inner)),
                (f"mlp.linear{end}", "mlp.down_proj.weight", _input_first),
            )
        ),
        *(row for row in _TUNIX if row[0].startswith("mlp.")),
    )


_FOUR_NORMS = {
    **{"post_attention_norm": "post_attention_layernorm"},
    **{"pre_ffw_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
}
_OTHER = {
    "llama": _TUNIX,
    "qwen": _TUNIX,
    "gemma": _gemma({"pre_ffw_norm": "post_attention_layernorm"}),
}
TABLES: dict[str, dict[str, tuple[Row, ...]]] = {
    "MaxText": {
        "llama": _maxtext(_remove_scale(_in_halves), _in_halves),
        "qwen": _maxtext(_input_first, _input_first),
        "gemma2": _maxtext_gemma(_remove_scale(_input_first), _tokens_over(np.float32)),
        "gemma3": _maxtext_gemma(_input_first, _tokens_over(np.dtype("bfloat16").type)),
    },
    "Tunix and gemma": {**_OTHER, "gemma2": _gemma(_FOUR_NORMS), "gemma3": _gemma(_FOUR_NORMS)},
}


def trainer_of(names: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the trainer that gives weights these names, and what all of them begin with.

    Names are as `hugging_face_names` takes them. None stands for no trainer that is known.
    """
    for trainer, mark in MARKS.items():
        for name in names:
            if _with_dots(name) == mark or _with_dots(name).endswith(f".{mark}"):
                return trainer, _with_dots(name).removesuffix(mark)
    return None


def hugging_face_names(arrays: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights under the names of Hugging Face; those of no known trainer as they are.

    What lies next to a trainer's parameters (steps, the optimizer's state) is passed over.

    Args:
        arrays: Arrays of numpy or JAX by their names, with dots or slashes between the parts.
        config: The config of the text model.

    Raises:
        UnsupportedError: The trainer's names are not known for this architecture.
    """
    trainer_and_prefix = trainer_of(arrays)
    if trainer_and_prefix is None:
        return dict(arrays)
    trainer, prefix = trainer_and_prefix
    tables = TABLES[trainer]
    architecture = (config.get("architectures") or [None])[0]
    family = FAMILIES.get(str(architecture), "")
    if family not in tables:
        known = ", ".join(name for name, kind in FAMILIES.items() if kind in tables)
        raise UnsupportedError(
            f"the parameters have names of {trainer}, which are known for {known}, not for "
            f"{architecture}"
        )
    sizes = _sizes(config)
    named: dict[str, Any] = {}
    for name, array in arrays.items():
        if _with_dots(name).startswith(prefix):
            short_name = _with_dots(name).removeprefix(prefix)
            named.update(_rename(short_name, array, tables[family], sizes))
    return named


def _with_dots(name: str) -> str:
    return name.replace("/", ".")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    width = int(config["hidden_size"])
    head_dim = config.get("head_dim") or width // int(config["num_attention_heads"])
    num_layers = int(config["num_hidden_layers"])
    return Sizes(num_layers, int(config["vocab_size"]), width, int(head_dim))


def _rename(
    name: str, array: Any, table: tuple[Row, ...], sizes: Sizes
) -> Iterator[tuple[str, Any]]:
    is_known = False
    for layer, part_name, part in _layers(name, array, sizes):
        place = "" if layer is None else f"layers.{layer}."
        for row_name, to, turn in table:
            if row_name != part_name:
                continue
            is_known = True
            to = to if to.startswith("lm_head") else f"model.{place}{to}"
            if "{}" in to:
                for expert in range(part.shape[0]):
                    yield to.format(expert), turn(part[expert], sizes)
            else:
                yield to, turn(part, sizes)
    if not is_known:
        yield name, array


def _layers(name: str, array: Any, sizes: Sizes) -> Iterator[tuple[int | None, str, Any]]:
    """Yields the parts of an array that belong to one layer: its place, its name in the layer.

    MaxText's scanned layers are along the second axis, and may be every second or sixth layer.
    """
    first, step, stacked = 0, 1, False
    if match := re.fullmatch(r"decoder\.layers\.layers_(\d+)\.(.+)", name):
        first, step, stacked = int(match[1]), GEMMA3_PERIOD, True
    elif match := re.fullmatch(r"decoder\.layers_remainder\.layers_(\d+)\.(.+)", name):
        first = sizes.num_layers // GEMMA3_PERIOD * GEMMA3_PERIOD + int(match[1])
    elif match := re.fullmatch(r"decoder\.(layers)\.(.+)", name):
        stacked = True
    elif match := re.fullmatch(r"(?:decoder\.layers_|layers\.|layer_)(\d+)\.(.+)", name):
        first = int(match[1])
    else:
        yield None, name, array
        return
    part_name = match[2]
    if pair := re.fullmatch(r"(\w+)_(local|global)(\..+)", part_name):  # Gemma 2, two layers in one
        first, step = 2 * first + (pair[2] == "global"), 2
        part_name = pair[1] + pair[3]
    if not stacked:
        yield first, part_name, array
    elif array.ndim > 1:
        for index in range(array.shape[1]):
            yield first + step * index, part_name, array[:, index]
