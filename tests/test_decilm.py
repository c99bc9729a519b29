"""DeciLM, which transformers does not have: its logits and tokens are those of a Llama with halves
that do nothing.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from safetensors.numpy import save_file  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from jaxpage import SamplingParams  # noqa: E402
from jaxpage.errors import CheckpointError, UnsupportedError  # noqa: E402
from jaxpage.models.registry import load_family  # noqa: E402
from tests.support.engines import make_llm, tokens_of  # noqa: E402
from tests.support.random_checkpoints import random_tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
WIDTH, HEADS, HEAD, FFN = 64, 4, 16, 512


def block(group: int | None, factor: float | None, **more: Any) -> dict[str, Any]:
    """Returns an entry of `block_configs`; None for a half that is left out."""
    attention = {"n_heads_in_group": group, "no_op": group is None, "window_length": None}
    ffn = {"ffn_mult": factor, "no_op": factor is None, "replace_with_linear": False}
    return {"attention": {**attention, **more}, "ffn": ffn}


BLOCKS = [block(2, 7.0), block(None, 2.0), block(4, None), block(None, None), block(2, 2.0)]
CONFIG = {
    **{"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "vocab_size": 131},
    **{"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": len(BLOCKS)},
    **{"num_key_value_heads": None, "intermediate_size": None, "max_position_embeddings": 128},
    **{"rope_theta": 500.0, "rms_norm_eps": 1e-5, "block_configs": BLOCKS},
}


def of_llama(tensors: dict[str, np.ndarray]) -> LlamaForCausalLM:
    """Returns a Llama of whole layers: keys and values are repeated, and absent columns are
    zero.
    """
    shared = {name: CONFIG[name] for name in ("vocab_size", "hidden_size", "rope_theta")}
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": FFN}
    depth = {"num_hidden_layers": len(BLOCKS), "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**shared, **sizes, **depth)).eval()
    state = {}
    for name, parameter in model.state_dict().items():
        tensor = tensors.get(name, np.zeros(parameter.shape, np.float32))
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            by_head = tensor.reshape(-1, HEAD, WIDTH)
            tensor = by_head.repeat(HEADS // len(by_head), axis=0).reshape(-1, WIDTH)
        widths = zip(parameter.shape, tensor.shape, strict=True)
        state[name] = torch.from_numpy(
            np.pad(tensor, [(0, all_ - width) for all_, width in widths])
        )
    model.load_state_dict(state)
    return model


@torch.no_grad()
def test_tokens_are_those_of_a_llama_with_halves_that_do_nothing(tmp_path):
    tensors = random_tensors(CONFIG)
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (512, WIDTH)
    assert tensors["model.layers.1.mlp.up_proj.weight"].shape == (256, WIDTH)
    assert not [name for name in tensors if ".layers.3." in name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    model = of_llama(tensors)
    prompts = [np.random.default_rng(seed).integers(0, 131, 9).tolist() for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    with make_llm(
        tmp_path, max_num_batched_tokens=16, block_size=4, num_blocks=40, max_model_len=60
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, (tokens, logprobs) in zip(prompts, tokens_of(outputs), strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.double().log_softmax(-1)
        for index, entries in enumerate(logprobs):
            for token, logprob in entries.items():
                assert abs(logprob - float(expected[index, token])) < 1e-4


@pytest.mark.parametrize(
    ("kind", "says", "blocks"),
    [
        (CheckpointError, "of each of 5 layers", BLOCKS[:4]),
        (CheckpointError, "of each of 5 layers", None),
        (CheckpointError, "of each of 5 layers", [*BLOCKS[:4], {"attention": {}}]),
        (CheckpointError, "n_heads_in_group = 3", [block(3, 2.0), *BLOCKS[1:]]),
        (CheckpointError, "ffn_mult = '2'", [block(2, "2"), *BLOCKS[1:]]),  # type: ignore[arg-type]
        (UnsupportedError, "attention in no layer", [block(None, 2.0)] * 5),
        (
            UnsupportedError,
            "replace_with_linear = True of attention in layer 0",
            [block(2, 2.0, replace_with_linear=True), *BLOCKS[1:]],
        ),
        (
            UnsupportedError,
            "window_length = 8 of attention in layer 4",
            [*BLOCKS[:4], block(2, 2.0, window_length=8)],
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(kind, says, blocks):
    config = {**CONFIG, "block_configs": blocks}
    with pytest.raises(kind, match=says):
        load_family(config).Spec.from_config(config)
