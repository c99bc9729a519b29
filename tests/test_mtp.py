"""MTP heads inside checkpoints: rows and drafts against torch in float64 for every family,
quantised heads, refusals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpage.assembly.planning.drafters import ModelDrafterFiles, open_drafter
from jaxpage.assembly.planning.drafting import open_drafting
from jaxpage.checkpoints import ModelFiles, load_weights, open_model
from jaxpage.checkpoints.in_memory import open_parameters
from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models.drafters.mtp import MtpHead
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.speculative_config import SpeculativeConfig
from tests.support.model_configs import config_json
from tests.support.mtp import MODELS, Model, save_with_head, states_of, torch
from tests.support.random_checkpoints import random_tensors, write_tensors
from tests.support.sweeps import few
from tests.test_eagle import LENGTH, TOKENS, Run, Target, run, run_oracle

MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=1)


@pytest.fixture(scope="module")
def models_with_heads(tmp_path_factory):
    models: dict[str, Model] = {}

    def of_family(family: str) -> Model:
        if family not in models:
            models[family] = save_with_head(family, tmp_path_factory.mktemp(family))
        return models[family]

    return of_family


def open_drafter_of(directory: Path) -> ModelDrafterFiles:
    return open_files(open_model(directory))


def open_files(files: ModelFiles) -> ModelDrafterFiles:
    drafter = open_drafter(MTP, files)
    assert isinstance(drafter, ModelDrafterFiles)
    return drafter


def run_on(model: Model) -> Run:
    """Returns its rows over `TOKENS`, and then over one place more, after its own output."""
    files = open_model(model.directory)
    parameters = load_weights(files.plan, "float32", jnp.asarray)
    output = states_of(model.model, TOKENS[:LENGTH])
    return run(open_drafter_of(model.directory), Target(files, {}, parameters, [], output))


def assert_as_the_reference(result: Run, model: Model) -> None:
    """Checks hidden states within 1e-5, and the first and second draft after every token."""
    output = states_of(model.model, TOKENS[:LENGTH])[: LENGTH - 1]
    outputs, logits = run_oracle(model.head, output.astype(np.float64))
    assert outputs.std() > 0.3
    np.testing.assert_allclose(result.outputs, outputs, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(result.logits.argmax(axis=1), logits.argmax(axis=1))


@pytest.mark.parametrize(
    "family",
    few(MODELS, ["deepseek_v3", "qwen3_5_moe", "mimo"]),
)
def test_rows_are_those_of_the_reference(family, models_with_heads):
    """The last one follows its own output, which gives the second draft."""
    model = models_with_heads(family)
    assert_as_the_reference(run_on(model), model)
    num_stored = sum(
        tensor.size
        for name, tensor in model.tensors.items()
        if not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        and ".indexer." not in name
    )
    drafter = open_drafter_of(model.directory)
    assert drafter.num_bytes("float32") == 4 * num_stored


def _before_the_norm(self: MtpHead, *arguments: Any) -> Any:
    """Hands on what the layer returns, and has the norm in the logits."""
    norm, self.norm = self.norm, lambda hidden: hidden
    output, pages = _call(self, *arguments)
    self.norm = norm
    return output, pages


def _zero_first(self: MtpHead, token_ids: Any, feature: Any, pages: Any, context: Any) -> Any:
    """Takes the embedding of position 0 away."""
    tokens = self.tokens
    self.tokens = lambda ids: tokens(ids) * (context.positions_T > 0)[:, None]
    output = _call(self, token_ids, feature, pages, context)
    self.tokens = tokens
    return output


def _swap_norms(self: MtpHead, *arguments: Any) -> Any:
    """Exchanges the norms of the embedding and of the hidden state."""
    self.embedding_norm, self.hidden_norm = self.hidden_norm, self.embedding_norm
    return _call(self, *arguments)


_call = MtpHead.__call__


@pytest.mark.parametrize(
    "mistake", few([_before_the_norm, _zero_first, _swap_norms], [_zero_first])
)
def test_a_planted_mistake_is_seen(mistake, models_with_heads, monkeypatch):
    monkeypatch.setattr(MtpHead, "__call__", mistake)
    model = models_with_heads("qwen3_5")
    with pytest.raises(AssertionError):
        assert_as_the_reference(run_on(model), model)


def test_the_reference_is_that_of_transformers(models_with_heads):
    """DeepSeek's `MtpModel` runs from the same files, over the same rows."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    model = models_with_heads("deepseek_v3")
    target = DeepseekV3ForCausalLM.from_pretrained(model.directory).eval()
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]  # it says 61
    output = states_of(target, TOKENS[:LENGTH])[: LENGTH - 1]
    theirs = MtpModel.from_pretrained(target).eval()
    with torch.no_grad():
        rows = theirs.forward_layer(
            0,
            torch.tensor(output)[None],
            torch.arange(1, LENGTH)[None],
            None,
            input_ids=torch.tensor(TOKENS[1:LENGTH])[None],
        )
    outputs, _ = model.head(TOKENS[1:LENGTH], output.astype(np.float64))
    np.testing.assert_allclose(rows[0].numpy(), outputs, atol=1e-5, rtol=1e-5)


def test_a_head_is_read_from_arrays_by_name(models_with_heads):
    """`from_parameters` and `update_parameters` take them; a module has no tensors of a head."""
    model = models_with_heads("deepseek_v3")
    config = json.loads((model.directory / "config.json").read_text())
    stored = load_file(model.directory / "model.safetensors")
    files = open_parameters(config, stored)
    ours, expected = (
        each.load("float32", np.asarray, progress=False)
        for each in (open_files(files), open_drafter_of(model.directory))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    module = replace(files, plan=replace(files.plan, layout="module"))
    with pytest.raises(UnsupportedError, match="and in arrays by name alone"):
        open_drafter(MTP, module)


# --- refusals


def copy_with(model: Model, directory: Path, drop: str = "", **fields: Any) -> Path:
    """Writes a copy of the checkpoint without tensors that begin like this, and with these
    fields.
    """
    config = json.loads((model.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    tensors = load_file(model.directory / "model.safetensors")
    write_tensors(
        directory,
        {
            name: tensor
            for name, tensor in tensors.items()
            if not drop or not name.startswith(drop) or name not in model.tensors
        },
    )
    return directory


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no tensors": (
        "deepseek_v3",
        "model.layers.3.",
        {},
        r"needs the tensors model\.layers\.3\.\*, and there are none \(config\.json counts 1 "
        r"in num_nextn",
    ),
    "no tensors of Qwen": ("qwen3_5", "mtp.", {}, r"needs the tensors mtp\.layers\.0\.\*"),
    "a part": (
        "deepseek_v3",
        "model.layers.3.enorm",
        {},
        r"'model\.layers\.3\.enorm\.weight' of shape \(48,\) is missing",
    ),
    "two heads": (
        "deepseek_v3",
        "",
        {"num_nextn_predict_layers": 2},
        "takes one head, .* counts 2 in num_nextn_predict_layers",
    ),
    "tables of its own": (
        "qwen3_5",
        "",
        {"mtp_use_dedicated_embeddings": True},
        "mtp_use_dedicated_embeddings = true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_cannot_be_used_are_refused_by_name(case, models_with_heads, tmp_path):
    """The model loads all the same."""
    family, drop, fields, text = REFUSED[case]
    directory = copy_with(models_with_heads(family), tmp_path, drop, **fields)
    with pytest.raises(CheckpointError, match=text):
        open_drafter(MTP, open_model(directory))


def test_a_model_without_heads_is_refused(models_with_heads, tmp_path):
    model = models_with_heads("deepseek_v3")
    directory = copy_with(model, tmp_path, "model.layers.3.", num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedError, match="needs a model with MTP heads"):
        open_drafter(MTP, open_model(directory))


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("exaone-moe-windows", "mtp."),
        ("mellum-windows", "mtp."),
        ("mimo-v2-flash-windows", "model.mtp."),
        ("nemotron-h-experts", "mtp."),
    ],
)
def test_heads_that_are_not_read_are_passed_over_and_refused(name, start, tmp_path):
    """transformers passes them over, too."""
    tensors = random_tensors(config_json(name))
    config = config_json(name, num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path, {**tensors, f"{start}norm.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="heads of this family are not read"):
        open_drafter(MTP, open_model(tmp_path))


def test_auto_is_mtp_where_the_checkpoint_has_a_head(models_with_heads, tmp_path):
    """Suffix decoding drafts for any other model."""
    requested = EngineConfig(speculative_config="auto").speculative_config
    model = models_with_heads("deepseek_v3")
    without = copy_with(model, tmp_path, "model.layers.3.")
    for directory, method in ((model.directory, "mtp"), (without, "suffix")):
        drafting = open_drafting(requested, open_model(directory))
        assert drafting.config is not None and drafting.config.method == method
        assert (drafting.drafter is not None) == (method == "mtp")


# --- quantised heads


def test_a_head_in_blocks_of_float8_is_read_as_it_is_stored(models_with_heads, tmp_path):
    """DeepSeek publishes products of the layer in float8 with a scale for each block, eh_proj and
    norms not.
    """
    model = models_with_heads("deepseek_v3")
    tensors, changed_head = {}, {}
    for name, tensor in load_file(model.directory / "model.safetensors").items():
        if name in model.tensors and _is_quantised(name):
            codes, scale = _in_blocks(tensor)
            tensors |= {name: codes, f"{name}_scale_inv": scale}
            scales = np.repeat(np.repeat(scale, 16, axis=0), 16, axis=1)
            changed_head[name] = (
                codes.astype(np.float32) * scales[: codes.shape[0], : codes.shape[1]]
            )
        else:
            tensors[name] = tensor
    config = json.loads((model.directory / "config.json").read_text())
    layers = ["model.layers.0", "model.layers.1", "model.layers.2"]
    scheme = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": layers,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    write_tensors(tmp_path, tensors)
    with TraceScope(make_layer_kernels(Backend("reference"))).open():
        result = run_on(model._replace(directory=tmp_path))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    stored = load_file(model.directory / "model.safetensors")
    write_tensors(plain, {**stored, **changed_head})
    expected = run_on(model._replace(directory=plain))
    assert len(changed_head) > 8
    np.testing.assert_allclose(result.outputs, expected.outputs, atol=1e-4, rtol=1e-4)
    codes, scale = _in_blocks(tensors["lm_head.weight"])
    write_tensors(tmp_path, tensors | {"lm_head.weight": codes, "lm_head.weight_scale_inv": scale})
    with pytest.raises(CheckpointError, match="use a model whose lm_head is not"):
        open_drafter(MTP, open_model(tmp_path))


def _is_quantised(name: str) -> bool:
    return (name.endswith("_proj.weight") and "eh_proj" not in name) or "kv_a_proj" in name


def _in_blocks(tensor: np.ndarray, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes, and the scale of each block."""
    rows, columns = tensor.shape
    padded = np.pad(tensor, ((0, -rows % size), (0, -columns % size)))
    blocks = padded.reshape(padded.shape[0] // size, size, -1, size)
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(448)
    codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return codes.astype(ml_dtypes.float8_e4m3fn), scale.astype(np.float32)
