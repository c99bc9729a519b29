"""EAGLE heads in torch, float64, on transformers' own decoder layers: the oracle, and files of them
in every published format.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

LAYERS = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}
TARGET = {**LAYERS, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 7}
_DECODERS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaModel),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
}


class Head(torch.nn.Module):
    """Holds what both kinds have. `tokens` and `table` are the target's where the file has none."""

    def __init__(self, layers: dict[str, Any], fused: int, *, fc_bias: bool, rows: int, seed: int):
        super().__init__()
        config_class, model_class = _DECODERS[layers["model_type"]]
        self.layers = layers
        self.config = config_class(
            **{key: value for key, value in layers.items() if key != "model_type"}
        )
        self.config._attn_implementation = "eager"
        self.decoder = model_class(self.config)
        self.decoder.norm = torch.nn.Identity()
        self.decoder.embed_tokens = torch.nn.Embedding(
            self.config.vocab_size, self.config.hidden_size
        )
        self.fc = torch.nn.Linear(fused, self.config.hidden_size, bias=fc_bias)
        self.table = torch.nn.Linear(self.config.hidden_size, rows, bias=False)
        self.seed = seed

    def drawn(self) -> Head:
        """Draws random numbers, each of which a float32 holds, for inference in float64."""
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                is_norm, is_matrix = "norm" in name, parameter.dim() > 1
                deviation = 1.3 / math.sqrt(parameter.shape[-1]) if is_matrix else 0.3
                parameter.normal_(1.0 if is_norm else 0.0, deviation, generator=generator)
        return self.eval().double()

    def take(self, target: dict[str, np.ndarray], *names: str) -> None:
        """Replaces the head's own tables by the target's."""
        tables = {
            "tokens": (self.decoder.embed_tokens, "model.embed_tokens.weight"),
            "head": (self.table, "lm_head.weight"),
        }
        for name in names:
            module, tensor = tables[name]
            module.weight = torch.nn.Parameter(
                torch.tensor(target[tensor]).double(), requires_grad=False
            )

    def run(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the tensors as the files call them, tables included."""
        names = {
            "decoder.embed_tokens.weight": "embed_tokens.weight",
            "table.weight": "lm_head.weight",
        }
        state = self.state_dict()
        return {
            names.get(name, name.removeprefix("decoder.")): value.float().numpy()
            for name, value in state.items()
        }


class Eagle(Head):
    """Returns the head of the authors' first model: no norm before the first attention, none at the
    end.
    """

    def __init__(self, *, fc_bias: bool = True, seed: int = 1, **layers: Any):
        layers = {**LAYERS, **layers}
        super().__init__(
            layers, 2 * layers["hidden_size"], fc_bias=fc_bias, rows=layers["vocab_size"], seed=seed
        )
        self.decoder.layers[0].input_layernorm = torch.nn.Identity()
        self.drawn()

    @torch.no_grad()
    def forward(self, token_ids: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outputs and the logits of every place."""
        embedded = self.decoder.embed_tokens(torch.tensor(token_ids))
        output = self.run(embedded, self.fc(torch.cat([embedded, torch.tensor(features)], -1)))
        return output.numpy(), self.table(output).numpy()


class _Both(torch.nn.Module):
    """In place of the norm before the first attention: what attention sees is the embedding and the
    feature, each normed.
    """

    def __init__(self, head: Eagle3):
        super().__init__()
        self.head = [head]  # no child of this

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (head,) = self.head
        normed = hidden if head.norm_before_residual else head.hidden_norm(hidden)
        return torch.cat([head.input_layernorm(head.embedded)[None], normed], -1)


class Eagle3(Head):
    def __init__(
        self,
        *,
        num_states: int = 3,
        target_width: int = LAYERS["hidden_size"],
        rows: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        seed: int = 2,
        **layers: Any,
    ):
        layers = {**LAYERS, **layers}
        width, fused = layers["hidden_size"], num_states * target_width
        super().__init__(layers, fused, fc_bias=False, rows=rows or layers["vocab_size"], seed=seed)
        norm = type(self.decoder.layers[0].input_layernorm)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.hidden_norm, self.input_layernorm = norm(width, 1e-3), norm(width, 1e-3)
        self.norm = norm(width, 1e-3)
        self.input_norm = norm(fused, 1e-3) if norm_before_fc else None
        self.fc_norm = (
            torch.nn.ModuleList([norm(target_width, 1e-3) for _ in range(num_states)])
            if fc_norm
            else None
        )
        first = self.decoder.layers[0]
        first.input_layernorm = _Both(self)
        for part in ("q_proj", "k_proj", "v_proj"):
            matmul = getattr(first.self_attn, part)
            wide = torch.nn.Linear(2 * width, matmul.out_features, bias=matmul.bias is not None)
            setattr(first.self_attn, part, wide)
        self.drawn()

    @torch.no_grad()
    def fuse(self, states: list[np.ndarray]) -> np.ndarray:
        """Returns the features of the target's hidden states."""
        fused = torch.cat([torch.tensor(state) for state in states], -1)
        fused = fused if self.input_norm is None else self.input_norm(fused)
        if self.fc_norm is not None:
            parts = fused.chunk(len(self.fc_norm), -1)
            fused = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        return self.fc(fused).numpy()

    @torch.no_grad()
    def forward(self, token_ids: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns outputs (features of the next places) and logits over the head's own tokens."""
        self.embedded, hidden = (
            self.decoder.embed_tokens(torch.tensor(token_ids)),
            torch.tensor(features),
        )
        output = self.run(
            self.embedded, self.hidden_norm(hidden) if self.norm_before_residual else hidden
        )
        normed = self.norm(output)
        return (normed if self.norm_output else output).numpy(), self.table(normed).numpy()

    def tensors(self) -> dict[str, np.ndarray]:
        outer = ("hidden_norm.", "input_layernorm.")
        return {
            f"layers.0.{name}" if name.startswith(outer) else name: value
            for name, value in super().tensors().items()
        }


def write(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    without: tuple[str, ...] = (),
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    saved = {
        name: np.ascontiguousarray(value) for name, value in tensors.items() if name not in without
    }
    save_file(saved, directory / "model.safetensors")
    return directory
