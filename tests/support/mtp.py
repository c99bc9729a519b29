"""MTP heads in torch, float64, on transformers' own decoder layers: the oracle, and checkpoints
that hold them under published names.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.hf_models import randomise, save_model
from tests.support.random_checkpoints import write_tensors

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

# By family: a model of `model_configs`, and whether files have its experts one by one.
MODELS = {
    "deepseek_v3": ("deepseek-v3-groups", True),
    "deepseek_v32": ("deepseek-v32-groups", True),
    "glm_moe_dsa": ("glm-moe-dsa-shared", True),
    "glm4_moe_lite": ("glm4-moe-lite-mixed", True),
    "glm4_moe": ("glm4-moe-norms", True),
    "qwen3_next": ("qwen3-next-mixed", True),
    "qwen3_5": ("qwen3-5-mixed", False),
    "qwen3_5_moe": ("qwen3-5-moe", False),
    "qwen3_5_images": ("qwen3-5-images", False),
    "mimo": ("qwen2-yarn", False),
}
# Families whose heads are layers after the model's last one, by number.
NUMBERED = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm4_moe", "glm_moe_dsa")
MIMO = "qwen2"  # Its model is Qwen 2, and so is the reference.
# The layer attends, and has experts if the model has.
ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


class Head(torch.nn.Module):
    """Rows of the head, by its definition: y = norm_f(layer(fc([norm_e(x); norm_h(h)]))), the
    logits head(y).
    """

    def __init__(self, model: Any, *, seed: int = 3):
        super().__init__()
        config = copy.deepcopy(model.config.get_text_config())
        for name, value in ONE_LAYER.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        config._experts_implementation = "eager"  # the others have no float64
        config.tie_word_embeddings = False  # the tables are the model's
        decoder = getattr(model.get_decoder(), "language_model", model.get_decoder())
        # a whole model of one layer, whose final norm is that of the head
        self.decoder = type(decoder)(config)
        norm, width = type(self.decoder.norm), config.hidden_size
        self.enorm, self.hnorm = (norm(width, config.rms_norm_eps) for _ in range(2))
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.config = config
        self.num_layers = model.config.get_text_config().num_hidden_layers
        randomise(self, torch.Generator().manual_seed(seed))
        # of the model
        self.decoder.embed_tokens = copy.deepcopy(model.get_input_embeddings())
        self.table = copy.deepcopy(model.get_output_embeddings())
        self.eval().double()

    @torch.no_grad()
    def forward(self, token_ids: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns outputs (the features of the next places) and logits of every row.

        token_ids: of the places after the rows.
        """
        embedded = self.enorm(self.decoder.embed_tokens(torch.tensor(token_ids)))
        parts = [embedded, self.hnorm(torch.tensor(features).double())]
        both = torch.cat(parts[::-1] if self.config.model_type == MIMO else parts, -1)
        output = self.decoder(inputs_embeds=self.fc(both)[None], use_cache=False)
        output = output.last_hidden_state[0]
        return output.numpy(), self.table(output).numpy()

    def tensors(self, *, separate: bool) -> dict[str, np.ndarray]:
        """Returns tensors as files name them. With `separate` experts are one by one."""
        decoder = {name: value.float() for name, value in self.decoder.state_dict().items()}
        numbered = self.config.model_type in NUMBERED
        if numbered:
            layer = start = f"model.layers.{self.num_layers}."
            names = "eh_proj enorm hnorm shared_head.norm"
        elif self.config.model_type == MIMO:
            layer = start = "model.mtp_layers.0."
            names = "input_proj token_layernorm hidden_layernorm final_layernorm"
        else:
            layer, start = "mtp.layers.0.", "mtp."
            names = "fc pre_fc_norm_embedding pre_fc_norm_hidden norm"
        values = [each.weight.float() for each in (self.fc, self.enorm, self.hnorm)]
        tensors = {
            f"{start}{name}.weight": value
            for name, value in zip(
                names.split(), [*values, decoder.pop("norm.weight")], strict=True
            )
        }
        if numbered:  # copies of the model's tables
            tensors[f"{layer}embed_tokens.weight"] = decoder["embed_tokens.weight"]
            tensors[f"{layer}shared_head.head.weight"] = self.table.weight.float()
        for name, value in decoder.items():
            if name.startswith("layers.0."):
                tensors |= _experts(layer + name.removeprefix("layers.0."), value, separate)
        return {
            name: np.ascontiguousarray(value.detach().numpy()) for name, value in tensors.items()
        }


def _experts(name: str, value: Any, separate: bool) -> dict[str, Any]:
    stem, _, last = name.rpartition(".experts.")
    if not stem or not separate:
        return {name: value}
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    return {
        f"{stem}.experts.{expert}.{part}.weight": rows
        for expert, both in enumerate(value)
        for part, rows in zip(parts, both.chunk(len(parts)), strict=True)
    }


class Model(NamedTuple):
    """A model of transformers, and its head."""

    model: Any
    head: Head
    directory: Path
    tensors: dict[str, np.ndarray]  # of the head


def save_with_head(
    family: str, directory: Path, *, num_tokens: int | None = None, **overrides: Any
) -> Model:
    """Writes the model of a family with a random head to `directory`.

    num_tokens: of so many tokens a greedy text is, so that a random head is right now and then.
    overrides: fields of config.json.
    """
    name, separate = MODELS[family]
    model = save_model(name, directory, **overrides)
    if num_tokens is not None:
        with torch.no_grad():
            model.get_output_embeddings().weight[num_tokens:] *= 0.1
    head = Head(model)
    config = json.loads((directory / "config.json").read_text())
    if family in NUMBERED or family == "mimo":
        config["num_nextn_predict_layers"] = 1
    if family == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = head.tensors(separate=separate)
    stored = load_file(directory / "model.safetensors")
    if "lm_head.weight" in stored:
        stored["lm_head.weight"] = model.get_output_embeddings().weight.detach().numpy()
    write_tensors(directory, {**stored, **tensors})
    return Model(model, head, directory, tensors)


def states_of(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Returns the hidden state of each token, after the final norm."""
    with torch.no_grad():
        states = model(torch.tensor(token_ids)[None], output_hidden_states=True).hidden_states
    return states[-1][0].numpy()
