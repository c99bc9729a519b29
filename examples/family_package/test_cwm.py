"""Greedy tokens are those of transformers. The package must be installed: `pip install '.[test]' && pytest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxpage import LLM, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("changes", [{}, {"mlp_bias": True, "num_key_value_heads": 4}])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.CwmConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=5,
        initializer_range=0.3,
        eos_token_id=96,
        **changes,
    )
    model = transformers.CwmForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
    )
    want = generated[0, len(PROMPT) :].tolist()
    with LLM(str(tmp_path), max_model_len=64, max_num_seqs=1) as llm:
        (output,) = llm.generate(
            PROMPT, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        )
    assert output.outputs[0].token_ids == want
