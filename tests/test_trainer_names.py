"""Weights under the names of MaxText, Tunix and gemma become those of Hugging Face.

The oracle writes each layout the other way round, from transformers' weights, by what the trainers'
own code says of it (MaxText's `checkpoint_conversion`, Tunix' and gemma's modules).
"""

from __future__ import annotations

import json
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx

from jaxpage.checkpoints import convert
from jaxpage.checkpoints.in_memory import open_parameters
from jaxpage.checkpoints.in_memory.trainer_names import hugging_face_names
from jaxpage.errors import UnsupportedError
from tests.support.engines import make_llm
from tests.support.hf_models import config_json, make_model

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

Arrays = dict[str, Any]
# Gemma 3 has two periods of six layers and one layer that is left.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-grouped", {}),
    "qwen2": ("qwen2-full", {}),
    "qwen3": ("qwen3-grouped", {}),
    "qwen3 with experts": ("qwen3-moe-mixed", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    "gemma": ("gemma-wide", {}),
    "gemma2": ("gemma2-caps", {"num_hidden_layers": 4}),
    "gemma3": ("gemma3-types", {"num_hidden_layers": 13, "layer_types": None}),
}


def weights(case: str) -> tuple[dict[str, Any], Arrays]:
    """Returns config.json, and the weights with the names of Hugging Face."""
    name, fields = CASES[case]
    config = config_json(name, **fields)
    state = make_model(name, **fields).state_dict()
    arrays = {key: value.numpy() for key, value in state.items()}
    if config.get("tie_word_embeddings", case.startswith("gemma")):
        arrays.pop("lm_head.weight", None)
    return config, arrays


def split_heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Reshapes [heads x H, in] to [in, heads, H]."""
    return x.T.reshape(x.shape[1], -1, head_dim)


def interleave(x: np.ndarray) -> np.ndarray:
    """Interleaves the halves of each head, because MaxText turns neighbours."""
    first, second = np.split(x, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def of_maxtext(case: str, config: dict[str, Any], arrays: Arrays, scanned: bool) -> Arrays:
    """Returns weights in the layout of MaxText, as a nested dict."""
    num_layers, gemma = config["num_hidden_layers"], case.startswith("gemma")
    layers: list[Arrays] = [{} for _ in range(num_layers)]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    experts: dict[tuple[int, str], list[np.ndarray]] = {}
    named: Arrays = {}
    norm = "norm" if gemma else "layer_norm"
    modules = {
        **{"input_layernorm": f"pre_self_attention_{norm}.scale"},
        **{"post_attention_layernorm": f"post_self_attention_{norm}.scale"},
        **{"pre_feedforward_layernorm": "pre_ffw_norm.scale"},
        **{"post_feedforward_layernorm": "post_ffw_norm.scale"},
        **{"q_norm": "self_attention.query_norm.scale", "k_norm": "self_attention.key_norm.scale"},
        **{"q_proj": "self_attention.query", "k_proj": "self_attention.key"},
        **{"v_proj": "self_attention.value", "o_proj": "self_attention.out.kernel"},
        **{"gate_proj": "mlp.wi_0.kernel", "up_proj": "mlp.wi_1.kernel"},
        **{"down_proj": "mlp.wo.kernel", "gate": "moe_block.gate.kernel"},
    }
    for name, x in arrays.items():
        if name == "lm_head.weight":
            named["decoder.logits_dense.kernel"] = np.pad(x, ((0, 5), (0, 0))).T
            continue
        if not name.startswith("model.layers."):
            if "embed_tokens" in name:
                factor = np.float32(config["hidden_size"] ** 0.5)
                if case == "gemma3":
                    factor = torch.tensor(factor).bfloat16().float().numpy()
                padded = np.pad(x * factor if gemma else x, ((0, 5), (0, 0)))
                named["token_embedder.embedding"] = padded
            else:
                named["decoder.decoder_norm.scale"] = x + 1 if gemma else x
            continue
        place, *_, module, kind = name.split(".")[2:]
        to = modules[module]
        if "experts" in name:
            wi = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}[module]
            experts.setdefault((int(place), f"moe_block.{wi}"), []).append(x.T)
            continue
        if kind == "bias":
            to, x = f"{to}.bias", x.reshape(-1, head_dim)
        elif module in ("q_proj", "k_proj", "v_proj"):
            to, x = f"{to}.kernel", split_heads(x, head_dim)
            if case == "llama" and module != "v_proj":
                x = interleave(x)
            if case in ("llama", "gemma2") and module == "q_proj":
                x = x * np.float32(head_dim**-0.5)
        elif module == "o_proj":
            x = x.T.reshape(-1, head_dim, x.shape[0])
        elif x.ndim == 2:
            x = x.T
        elif gemma:
            x = x + 1
        layers[int(place)][to] = x
    for (layer, to), parts in experts.items():
        layers[layer][to] = np.stack(parts)
    if case == "gemma2":  # two layers are one: names say which of them
        pairs = zip(layers[::2], layers[1::2], strict=True)
        layers = [
            {
                ".".join([f"{to.partition('.')[0]}_{end}", to.partition(".")[2]]): x
                for end, layer in (("local", local), ("global", other))
                for to, x in layer.items()
            }
            for local, other in pairs
        ]
    if not scanned:
        groups = {f"decoder.layers_{index}": [layer] for index, layer in enumerate(layers)}
    elif case == "gemma3":
        groups = {f"decoder.layers.layers_{index}": layers[index:12:6] for index in range(6)}
        groups["decoder.layers_remainder.layers_0"] = layers[12:]
    else:
        groups = {"decoder.layers": layers}
    for group, members in groups.items():
        is_stacked = scanned and "remainder" not in group
        for to in members[0]:
            parts = [layer[to] for layer in members]
            named[f"{group}.{to}"] = np.stack(parts, axis=1) if is_stacked else parts[0]
    tree = flax.traverse_util.unflatten_dict(named, sep=".")
    return {"params": {"params": tree}, "step": np.zeros((), np.int32)}


def of_tunix(case: str, config: dict[str, Any], arrays: Arrays) -> Arrays:
    """Returns weights of Llama or Qwen in the layout of Tunix."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    named: Arrays = {}
    for name, x in arrays.items():
        *before, module, kind = name.removeprefix("model.").split(".")
        if kind == "bias":
            named[".".join([*before[:2], "attn", f"{module[0]}_bias"])] = x
        elif module == "embed_tokens":
            named["embedder.input_embedding"] = x
        elif module in ("q_proj", "k_proj", "v_proj"):
            named[".".join([*before[:2], "attn", module, "w"])] = split_heads(x, head_dim)
        elif module == "o_proj":
            whole = x.T.reshape(-1, head_dim, x.shape[0])
            named[".".join([*before[:2], "attn", module, "w"])] = whole
        elif "mlp" in before:
            named[".".join([*before, module, "kernel"])] = x.T
        else:
            place = [part.replace("self_attn", "attn") for part in before]
            module = "final_norm" if module == "norm" else module
            named[".".join([*place, module, "w"])] = x.T
    return named


def of_gemma(case: str, config: dict[str, Any], arrays: Arrays) -> Arrays:
    """Returns weights of Gemma in the layout of the library gemma."""
    head_dim, num_layers = config["head_dim"], config["num_hidden_layers"]
    named: Arrays = {
        "transformer/embedder": {"input_embedding": arrays["model.embed_tokens.weight"]},
        "transformer/final_norm": {"scale": arrays["model.norm.weight"]},
    }
    for layer in range(num_layers):
        names = {
            name.removeprefix(f"model.layers.{layer}."): x
            for name, x in arrays.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        q, k, v = (
            names[f"self_attn.{x}_proj.weight"].reshape(-1, head_dim, config["hidden_size"])
            for x in "qkv"
        )
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        at = f"transformer/layer_{layer}"
        if len(q) == len(k):
            named[f"{at}/attn/qkv_einsum"] = {"w": np.stack([q, k, v])}
        else:
            named[f"{at}/attn/q_einsum"] = {"w": q}
            named[f"{at}/attn/kv_einsum"] = {"w": np.stack([k, v])}
        output = names["self_attn.o_proj.weight"]
        named[f"{at}/attn/attn_vec_einsum"] = {"w": output.T.reshape(-1, head_dim, output.shape[0])}
        gating = np.stack([names[f"mlp.{x}_proj.weight"] for x in ("gate", "up")])
        gating = gating.swapaxes(1, 2) if case == "gemma" else gating
        named[f"{at}/mlp"] = {"gating_einsum": gating, "linear": names["mlp.down_proj.weight"].T}
        norms = {"input_layernorm": "pre_attention_norm"}
        if case == "gemma":
            norms["post_attention_layernorm"] = "pre_ffw_norm"
        else:
            norms["post_attention_layernorm"] = "post_attention_norm"
            norms["pre_feedforward_layernorm"] = "pre_ffw_norm"
            norms["post_feedforward_layernorm"] = "post_ffw_norm"
        for name, to in norms.items():
            named[f"{at}/{to}"] = {"scale": names[f"{name}.weight"]}
        for x, to in (("q", "_query_norm"), ("k", "_key_norm")):
            if f"self_attn.{x}_norm.weight" in names:
                named[f"{at}/attn/{to}"] = {"scale": names[f"self_attn.{x}_norm.weight"]}
    return named


def assert_as_hugging_face(
    case: str, config: dict[str, Any], arrays: Arrays, expected: Arrays
) -> None:
    stacked = {name for name in expected if ".experts." in name and name.endswith("_proj")}
    flat = flax.traverse_util.flatten_dict(arrays, sep="/")
    named = hugging_face_names(flat, config)
    assert named.keys() == expected.keys() - stacked
    for name, x in named.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


def separate(arrays: Arrays) -> Arrays:
    """Separates the experts of transformers 5, which are in one tensor, as those of files are."""
    named: Arrays = {}
    for name, x in arrays.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(x):
                for kind, part in zip(("gate", "up"), np.split(both, 2), strict=True):
                    named[name.replace("gate_up_proj", f"{expert}.{kind}_proj.weight")] = part
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(x):
                named[name.replace("down_proj", f"{expert}.down_proj.weight")] = part
        else:
            named[name] = x
    return named


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "each layer"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "gemma"])
def test_names_of_maxtext(case, scanned):
    config, arrays = weights(case)
    expected = separate(arrays)
    assert_as_hugging_face(case, config, of_maxtext(case, config, expected, scanned), expected)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_names_of_tunix(case):
    config, arrays = weights(case)
    assert_as_hugging_face(case, config, of_tunix(case, config, arrays), arrays)


class Node(nnx.Module):
    """A module of the arrays in a nested dict; keys that are numbers make a list."""

    def __init__(self, tree: Arrays) -> None:
        for name, value in tree.items():
            if not isinstance(value, dict):
                made: Any = nnx.Param(jnp.asarray(value))
            elif "0" in value:
                made = nnx.List([Node(value[str(index)]) for index in range(len(value))])
            else:
                made = Node(value)
            setattr(self, name, made)


def test_a_module_of_tunix_is_taken_as_its_arrays_are():
    config, arrays = weights("llama")
    tree = flax.traverse_util.unflatten_dict(of_tunix("llama", config, arrays), sep=".")
    named = open_parameters(config, Node(tree)).plan.arrays
    assert named.keys() == arrays.keys()
    for name, x in named.items():
        np.testing.assert_array_equal(x, arrays[name])


@pytest.mark.parametrize("case", ["gemma", "gemma2", "gemma3"])
def test_names_of_gemma(case):
    config, arrays = weights(case)
    assert_as_hugging_face(case, config, of_gemma(case, config, arrays), arrays)


@pytest.mark.usefixtures("decode_as_chunks")
def test_a_checkpoint_of_maxtext_is_converted_and_its_arrays_are_parameters(tmp_path):
    """An engine of either gives transformers' tokens. A mistake is planted: no turned pairs."""
    config, arrays = weights("llama")
    source = tmp_path / "trained"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    tree = of_maxtext("llama", config, arrays, scanned=True)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(source / "orbax", tree)
    convert(source, tmp_path / "converted", progress=False)
    del tree["step"]
    prompt = list(range(2, 9))
    with torch.no_grad():
        model = make_model("llama-grouped")
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    with make_llm(tmp_path / "converted", max_num_seqs=2, max_model_len=64) as llm:
        assert greedy(llm, prompt) == ids[len(prompt) :]
        llm.update_parameters(tree)
        assert greedy(llm, prompt) == ids[len(prompt) :]
        query = tree["params"]["params"]["decoder"]["layers"]["self_attention"]["query"]
        query["kernel"] = np.roll(query["kernel"], 1, axis=-1)
        llm.update_parameters(tree)
        assert greedy(llm, prompt) != ids[len(prompt) :]


def greedy(llm: Any, prompt: list[int]) -> list[int]:
    from jaxpage import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_an_architecture_without_a_table_is_refused_by_name():
    arrays = {"token_embedder.embedding": np.zeros((4, 2))}
    with pytest.raises(UnsupportedError, match="names of MaxText.*not for OPTForCausalLM"):
        hugging_face_names(arrays, config_json("opt-norm-first"))
    square = {
        "embedder.input_embedding": np.zeros((4, 2)),
        "layer_0.mlp.gating_einsum": np.zeros((2, 3, 3)),
    }
    with pytest.raises(UnsupportedError, match="3 by 3 does not show"):
        hugging_face_names(square, config_json("gemma-wide"))
