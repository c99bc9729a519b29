"""Text models of checkpoints that hold other models too: older names, absent fields, what is not
loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxpage.checkpoints.opening import describe_config, open_model
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.quantization.scheme_choice import quantization_of
from jaxpage.errors import UnsupportedError
from jaxpage.models.registry import load_family
from tests.support.engines import make_llm
from tests.support.hf_models import config_json, make_model, save_model
from tests.test_models import fill, oracle, read_spec

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

State = dict[str, np.ndarray]


def as_llava(name: str) -> str:
    """Returns the name of a tensor in files of transformers before 4.52."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head.") else name


def as_qwen(name: str) -> str:
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def headless(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("mistral3-images", as_llava),
        ("qwen2-vl", as_qwen),
        ("qwen3-vl-moe", as_qwen),
        ("gemma4-images", headless),
        ("gemma3n-images", headless),
    ],
)
def test_files_with_older_names_fill_the_same_parameters(name, older):
    state, _, _ = oracle(name)
    family, spec = read_spec(name)
    renamed = {older(key): value for key, value in state.items()}
    assert len(renamed) == len(state) and renamed.keys() != state.keys()
    if name == "qwen3-vl-moe":  # its published experts are [in, out]
        experts = [key for key in renamed if ".experts." in key]
        assert experts
        renamed |= {key: renamed[key].swapaxes(1, 2) for key in experts}
    same = jax.tree.map(np.array_equal, fill(family, spec, renamed), fill(family, spec, state))
    assert jax.tree.all(same)


def test_a_published_config_of_gemma_3_that_leaves_sizes_out_is_read_as_by_transformers():
    """The 4B model has no number of heads, no width of a head and no vocabulary."""
    text = {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
        **{"num_hidden_layers": 34, "sliding_window": 1024},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = {"model_type": "gemma3", "text_config": text}
    theirs = transformers.Gemma3Config(text_config=dict(text)).text_config
    named = {**config, "architectures": ["Gemma3ForConditionalGeneration"]}
    spec: Any = load_family(named).Spec.from_config(named)
    assert spec.vocab_size == theirs.vocab_size
    assert spec.num_query_heads == theirs.num_attention_heads
    assert spec.kv.num_kv_heads == theirs.num_key_value_heads
    assert spec.kv.head_dim == theirs.head_dim
    assert spec.tie_word_embeddings and spec.rope.frequencies[0] == 1 / 8


@pytest.mark.parametrize(
    "name",
    [
        "qwen2-vl",
        "qwen3-vl",
        "qwen3-vl-moe",
        "mistral3-growth",
        "llama4-images",
        "exaone4-5-images",
    ],
)
def test_absent_fields_mean_what_the_class_of_the_text_model_says(name):
    """Each field alone is left out, and the config that transformers makes of the rest is read."""
    config = config_json(name)
    optional = {*config["text_config"]} - {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("vocab_size", "model_type", "num_experts"),
    }
    family = load_family(config)
    model_class = getattr(transformers, config["architectures"][0])
    for left in [*({field} for field in optional), optional]:
        text = {key: value for key, value in config["text_config"].items() if key not in left}
        if "num_key_value_heads" in left:  # the defaults of 8 to 32 do not divide 4 heads
            text |= {"num_attention_heads": 32, "hidden_size": 1024}
        whole_config = {**config, "text_config": text}
        fields = json.loads(
            json.dumps({k: v for k, v in whole_config.items() if k != "architectures"})
        )
        whole = model_class.config_class(**fields).to_dict()
        whole["architectures"] = whole_config["architectures"]
        spec = family.Spec.from_config(whole_config)
        assert spec == family.Spec.from_config(whole), left


def test_a_text_model_that_is_not_known_is_refused_by_its_type():
    config = config_json("mistral3-images", model_type="mistral9")
    with pytest.raises(UnsupportedError, match="'mistral9', which is not one of mistral, min"):
        load_family(config)


@pytest.mark.parametrize("tied", [True, False])
def test_files_say_whether_a_head_is_tied_where_the_config_does_not(tmp_path, tied):
    save_model("mistral3-images", tmp_path, tie_word_embeddings=tied)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"].pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config))
    assert open_model(tmp_path).spec.tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("name", "others", "idle", "what"),
    [
        (
            "gemma4-images",
            ("model.vision_tower.x", "model.embed_audio.x"),
            ("model.language_model.layers.4.self_attn.k_proj.weight",),
            "images, videos and sound",
        ),
        ("llama4-images", (), (), "images"),
    ],
)
def test_tensors_for_images_are_counted_in_one_line(name, others, idle, what, tmp_path, caplog):
    """Those of layers that share pages are not needed either, and count as none of them."""
    save_model(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {each: np.zeros(3, np.float32) for each in (*others, *idle)}
    save_file({**tensors, **more}, file, {"format": "pt"})
    count = sum("language_model" not in each for each in {**tensors, **more})
    assert count
    with caplog.at_level(logging.WARNING), make_llm(tmp_path, max_model_len=60, limit_images=0):
        pass
    warnings = [line for line in caplog.messages if "text model alone" in line]
    why = f"this is the text model alone: {what} are not supported, and"
    if name == "gemma4-images":  # whose encoder of pictures is left out by the setting
        why = f"limit_images is 0, so this is the text model alone, without {what}:"
    assert warnings == [f"{why} the checkpoint's {count} tensors for them are not loaded"]


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize(
    ("name", "older"), [("mistral3-images", as_llava), ("qwen2-vl", as_qwen), ("qwen3-vl", str)]
)
def test_names_in_a_quantisation_are_matched_as_by_the_library(name, older, others):
    """Exact names of linear modules, in today's words or in older ones.

    A name of what contains them is of none.
    """
    library = pytest.importorskip("compressed_tensors.quantization")
    layers = "model.language_model.layers"
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    named = [f"{layers}.0.mlp.up_proj", f"{layers}.1.self_attn.o_proj", f"{layers}.1.mlp"]
    left_out = ["lm_head", f"{layers}.0.self_attn.q_proj", f"{layers}.0.self_attn", "q_proj"]

    def state(rename: Callable[[str], str]) -> dict[str, Any]:
        targets = list(map(rename, named))
        groups = {"a": {"targets": targets, "weights": weights, "input_activations": inputs}}
        if others:
            groups["b"] = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        config = {"config_groups": groups, "format": "int-quantized"}
        ignored = [*map(rename, left_out), "re:.*vision.*", "re:.*down_proj"]
        return {"quant_method": "compressed-tensors", **config, "ignore": ignored}

    model = make_model(name)
    library.apply_quantization_config(model, library.QuantizationConfig(**state(str)))
    schemes = {
        module_name: getattr(module, "quantization_scheme", None)
        for module_name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and (module_name == "lm_head" or module_name.startswith(f"{layers}."))
    }
    expected = {
        module_name: scheme and scheme.input_activations is not None
        for module_name, scheme in schemes.items()
    }
    assert list(expected.values()).count(True) == 2
    for rename in (str, older):
        config = {**config_json(name), "quantization_config": state(rename)}
        scheme = describe_config(
            config, lambda config=config: quantization_of(config, None), Problems(Path())
        ).quantization
        forms = {module_name: scheme.form_of(module_name) for module_name in expected}
        int8_inputs = {
            module_name: form and form.int8_inputs for module_name, form in forms.items()
        }
        assert int8_inputs == expected
