"""A model that says a text again and again: each token is followed by a certain other one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import jaxpage

# Each character but the last is no token of its own, and no byte of them comes twice.
TEXT = "\U0001f389\u9f98\u0c24\u00f1 a"
START = ":"  # what the text follows
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}" + START


def write_successors(directory: Path) -> str:
    """Writes the model in the shape of the packaged one, with byte fallback, and returns its directory."""
    packaged = Path(jaxpage.__file__).parent / "demo"
    directory.mkdir()
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_text((packaged / name).read_text())
    backend = _tokenizer()
    backend.save(str(directory / "tokenizer.json"))
    settings = json.loads((packaged / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": TEMPLATE})
    )
    said = backend.encode(START + TEXT, add_special_tokens=False).ids[1:]  # without "▁"
    assert len(said) == len(set(said)) == 14
    save_file(
        _weights(load_file(packaged / "model.safetensors"), said), directory / "model.safetensors"
    )
    return str(directory)


def _tokenizer() -> Tokenizer:
    """As Llama 2's, with four tokens that are no bytes."""
    texts = ["<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", ":"]
    vocabulary = {text: index for index, text in enumerate([*texts, "\u2581a"])}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _weights(like: dict[str, np.ndarray], said: list[int]) -> dict[str, np.ndarray]:
    """The first token leads to the second, and the last to the second again.

    Each neuron of the first layer knows one token, and adds the next one to the stream. All else is zero.
    """
    weights = {
        name: (np.ones if name.endswith("norm.weight") else np.zeros)(tensor.shape, np.float32)
        for name, tensor in like.items()
    }
    num_tokens, width = weights["model.embed_tokens.weight"].shape
    rows = np.random.default_rng(0).choice([-1.0, 1.0], (num_tokens, width)).astype(np.float32)
    weights["model.embed_tokens.weight"] = rows
    follows = [*said[1:], said[1]]
    layer = "model.layers.0.mlp."
    for neuron, (token_id, next_id) in enumerate(zip(said, follows, strict=True)):
        weights[layer + "gate_proj.weight"][neuron] = rows[token_id] * (20 / width)
        weights[layer + "up_proj.weight"][neuron] = rows[token_id] / width
        weights[layer + "down_proj.weight"][:, neuron] = rows[next_id]
    return weights
