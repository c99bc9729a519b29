"""Every model family through the real engine, paged, batched and chunked, against transformers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from jaxpage import LLM, SamplingParams  # noqa: E402
from tests.support.engines import LogitsWitness, invariants, make_llm  # noqa: E402
from tests.support.hf_models import MODELS, save_model  # noqa: E402
from tests.support.sweeps import few  # noqa: E402

PROMPT_LENGTHS = (3, 41, 17, 30)
NUM_TOKENS = 14
# Of each family. The numbers of all configurations are compared in tests/test_models.py; here it is what the engine makes of them.
ONE_OF_EACH = (
    *("llama-grouped", "mistral-window", "qwen2-layer-types", "qwen3-windows", "opt-350m-form", "gpt2-usual"),
    *("gemma2-caps", "gemma3-types", "cohere2-parallel", "olmo3-windows", "glm4-interleaved", "falcon-grouped"),
    *("gpt-oss-windows", "deepseek-v2-groups", "deepseek-v3-groups", "qwen3-5-mixed"),
)


@torch.no_grad()
def greedy_with_logits(model, prompt, num_tokens):
    """Transformers' own forward over the growing sequence: tokens, and the logits of each."""
    ids, logits = list(prompt), []
    for _ in range(num_tokens):
        row = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        logits.append(row)
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], logits


@pytest.mark.parametrize("name", few(MODELS, ONE_OF_EACH))
def test_tokens_and_logits_are_those_of_transformers(name, tmp_path):
    model = save_model(name, tmp_path)
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, model.config.get_text_config().vocab_size, length).tolist() for length in PROMPT_LENGTHS]
    # Chunks of 16 tokens cut every long prompt; 17 blocks of 4 do not hold the first two sequences to their end.
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 18, "max_model_len": 60}
    with make_llm(tmp_path, **settings) as llm:
        witness = LogitsWitness(llm)
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False
        )
        invariants(llm)
        if (
            llm._engine.scheduler.block_manager.groups[0].sliding_window is None
        ):  # else blocks that fell out of the window are enough
            assert llm.stats()["num_preemptions_total"]["recompute"] > 0
    tolerance = 2e-4 if name.startswith(("qwen3-5", "qwen3-next")) else 1e-4  # torch computes recurrences in chunks
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, logits = greedy_with_logits(model, prompt, NUM_TOKENS)
        assert output.outputs[0].token_ids == tokens
        for place, row in enumerate(logits):
            np.testing.assert_allclose(witness.logits[index, len(prompt) + place], row, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        itertools.product(["llama-grouped", "gpt2-usual", "opt-plain"], ["bfloat16", "float16"]),
        [("llama-grouped", "bfloat16")],
    ),
)
def test_half_precision_weights_load_and_run(name, dtype, tmp_path):
    model = save_model(name, tmp_path, dtype=getattr(torch, dtype)).float()
    prompt = list(range(1, 20))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    want, _ = greedy_with_logits(model, prompt, 8)
    with make_llm(tmp_path, **settings, max_model_len=60) as llm:  # auto: float32 on CPU
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == want
    with LLM(str(tmp_path), dtype=dtype, use_tqdm=False, num_blocks=20, max_model_len=60, **settings) as llm:
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 8
        first = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
        chosen = output.token_ids[0]
        assert abs(output.logprobs[0][chosen].logprob - float(first[chosen])) < 0.15
