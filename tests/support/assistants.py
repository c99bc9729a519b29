"""Gemma 4's assistants of transformers with random weights, and the drafts of its assisted
generation: the oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import transformers

from tests.support.hf_models import randomise, save_model

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
from transformers.generation import candidate_generator  # noqa: E402 - it needs torch

WINDOW = 7
NUM_DRAFTS = 3
# Heads of 16 and 32 are those of the kernel for CPUs, which compiles faster than what takes its
# place.
HEADS = {"head_dim": 16, "global_head_dim": 32}
SIZES = {
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "vocab_size_per_layer_input": 96,
    **HEADS,
}
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
# The target's heads, in layers half as wide and of another number.
LAYERS = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 8, **HEADS, "layer_types": TYPES},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    **{"sliding_window": WINDOW, "max_position_embeddings": 256},
}
GROUPS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 5}
# A greedy text is of so many tokens, so that a random assistant is right now and then.
NUM_TOKENS = 3


class Pair(NamedTuple):
    """A target and its assistant, with the directories of both."""

    target: Any
    assistant: Any
    directory: Path
    assistant_directory: Path


def save_pair(root: Path, **overrides: Any) -> Pair:
    """Writes a target and an assistant that fits it."""
    target = save_model("gemma4-shared", root / "target", **SIZES)
    with torch.no_grad():
        target.get_output_embeddings().weight[NUM_TOKENS:] *= 0.1
    target.save_pretrained(root / "target")
    assistant = save_assistant(root / "assistant", target, **overrides)
    return Pair(target, assistant, root / "target", root / "assistant")


def save_assistant(
    directory: Path, target: Any, kind: str = "Gemma4Assistant", *, seed: int = 6, **overrides: Any
) -> Any:
    """Writes an assistant; `overrides` are fields of its config.json, those of its layers too."""
    text = target.config.get_text_config()
    layers = {**LAYERS, "num_key_value_heads": text.num_key_value_heads}
    layers |= {name: value for name, value in overrides.items() if name in layers}
    fields = {name: value for name, value in overrides.items() if name not in layers}
    unified = "Unified" in kind
    text_class = "Gemma4UnifiedTextConfig" if unified else "Gemma4TextConfig"
    fields["text_config"] = getattr(transformers, text_class)(**layers)
    fields["backbone_hidden_size"] = text.hidden_size
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    with torch.no_grad():
        model.get_output_embeddings().weight[NUM_TOKENS:] *= 0.1
        if model.masked_embedding is not None:
            order = torch.randperm(layers["vocab_size"], generator=generator)
            model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(directory)
    return model


def change_config(directory: Path, **fields: Any) -> None:
    """Changes fields of config.json; those of the layers where the layers have them."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for name, value in fields.items():
        (config["text_config"] if name in config["text_config"] else config)[name] = value
    file.write_text(json.dumps(config))


Draft = tuple[tuple[int, ...], tuple[int, ...]]  # the known tokens, and the drafts after them


def generate(pair: Pair, prompt: list[int], num_tokens: int) -> tuple[list[int], list[Draft], int]:
    """Returns the text of assisted generation, its drafts, and how many of these were accepted."""
    drafts: list[Draft] = []
    kind = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    propose = kind.get_candidates

    def listen(self: Any, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        candidates, logits = propose(self, input_ids, *arguments, **options)
        known, whole = input_ids[0].tolist(), candidates[0].tolist()
        if len(whole) > len(known):
            drafts.append((tuple(known), tuple(whole[len(known) :])))
        return candidates, logits

    settings = pair.assistant.generation_config
    settings.num_assistant_tokens = NUM_DRAFTS
    settings.num_assistant_tokens_schedule = "constant"
    with mock.patch.object(kind, "get_candidates", listen), torch.no_grad():
        whole = pair.target.generate(
            torch.tensor([prompt]),
            assistant_model=pair.assistant,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
    accepted = 0
    for known, drafted in drafts:
        right = np.array(drafted) == np.array(whole[len(known) : len(known) + len(drafted)])
        accepted += int(np.cumprod(right).sum())
    return whole[len(prompt) :], drafts, accepted


def states_of(target: Any, tokens: list[int]) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Returns the target's hidden states after its final norm, and the keys and values of each type
    of layer.
    """
    with torch.no_grad():
        outputs = target(
            torch.tensor([tokens]), output_hidden_states=True, return_shared_kv_states=True
        )
    return outputs.hidden_states[-1], dict(outputs.shared_kv_states)


def draft(pair: Pair, model: Any, token: int, state: Any, kv: Any, position: int) -> Any:
    """Returns what an assistant of the pair's target makes of a token and the state before it."""
    embedded = pair.target.get_input_embeddings()(torch.tensor([[token]]))
    with torch.no_grad():
        return model(
            inputs_embeds=torch.cat([embedded, state], dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=kv,
        )
