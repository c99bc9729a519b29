"""Every model family through the real engine, paged, batched and chunked, against transformers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from flax import nnx  # noqa: E402

from jaxpage import LLM, SamplingParams  # noqa: E402
from jaxpage.models.base import make_model  # noqa: E402
from jaxpage.models.registry import load_family  # noqa: E402
from tests.support.engines import invariants, make_llm, tokens_of  # noqa: E402
from tests.support.family_names import FAMILY_OF  # noqa: E402
from tests.support.hf_models import MODELS, config_json, save_model  # noqa: E402
from tests.support.model_forms import SIZES  # noqa: E402
from tests.support.scripted import draft_with, without_drafts  # noqa: E402
from tests.support.sweeps import few  # noqa: E402
from tests.support.synthetic import SyntheticProposer  # noqa: E402

PROMPT_LENGTHS = (3, 41, 17, 30)
NUM_TOKENS = 14
# Chunks of 16 tokens cut every long prompt; 17 blocks of 4 do not hold the first two sequences to
# their end.
TIGHT = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 18,
    "max_model_len": 60,
}
TOKEN_BY_TOKEN = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "num_blocks": 61,
    "max_model_len": 60,
}
# Models whose layers differ from each other.
VARIED = (
    *("llama-grouped", "mistral-window", "qwen2-layer-types", "qwen3-windows", "opt-350m-form"),
    *("gpt2-usual", "gemma2-caps", "gemma3-types", "gemma4-shared", "gemma3n-shared"),
    *("cohere2-parallel", "olmo3-windows", "glm4-interleaved", "falcon-grouped"),
    *("gpt-oss-windows", "deepseek-v2-groups", "deepseek-v3-groups", "qwen3-5-mixed"),
    *("granitemoehybrid-mixed", "lfm2-mixed", "llama4-chunks"),
)
# A model of each family.
OF_FAMILY = {
    FAMILY_OF[config_json(name)["architectures"][0]]: name for name in (*reversed(MODELS), *VARIED)
}
# These have every kind of page and of module that an engine could compute otherwise; the others run
# in a sweep. The numbers of all of them are compared in tests/test_models.py.
ALWAYS = (
    "gemma3n",
    "gemma4",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama4",
    "mistral4",
    "opt",
    "zamba2",
)
# torch computes these recurrences in chunks.
CHUNKED = ("qwen3-5", "qwen3-next", "granitemoehybrid", "zamba2", "olmo-hybrid", "kimi-linear")
# Attributes of layouts that say nothing of their operations.
PASSED_OVER = ("layer_index", "index", "convolution_index")
# These compute each token by itself, or arrange in another way what the models above have.
BY_TOKEN = {
    *("AttentionInParts", "FalconH1Layer", "FalconMLP", "HalfBlock", "HeadNorm", "XIELU"),
}


@torch.no_grad()
def assert_as_transformers(model: Any, name: str, prompts: Any, outputs: Any) -> None:
    """Asserts that each greedy token is the likeliest one, and all reported log probabilities
    agree.
    """
    tolerance = 2e-4 if name.startswith(CHUNKED) else 1e-4
    for prompt, (tokens, logprobs) in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        expected = logits.log_softmax(-1)
        for index, entries in enumerate(logprobs):
            for token, logprob in entries.items():
                assert abs(logprob - float(expected[index, token])) < tolerance
            assert max(entries.values()) > float(expected[index].max()) - tolerance


def test_there_is_a_model_of_each_family():
    assert OF_FAMILY.keys() == set(FAMILY_OF.values())


def sizes_of(name: str) -> dict[str, int]:
    """Returns sizes with heads of 16: those of the kernel for CPUs, which compiles faster than what
    takes its place.
    """
    config = config_json(name)
    family = FAMILY_OF[config["architectures"][0]]
    is_other = OF_FAMILY[family] != name or "kv_lora_rank" in config
    is_sized = name in VARIED or family in SIZES or is_other
    return {} if is_sized else {"hidden_size": 64, "head_dim": 16}


def traits_of_pages(value: Any, name: str = "pages") -> set[str]:
    """Returns the kinds, the flags, and which numbers are given, but not how large they are."""
    if dataclasses.is_dataclass(value):
        fields = [
            field.name for field in dataclasses.fields(value) if field.name not in PASSED_OVER
        ]
        inner = [traits_of_pages(getattr(value, field), f"{name}.{field}") for field in fields]
        return {f"{name}: {type(value).__name__}"}.union(*inner)
    if isinstance(value, tuple):
        inner = [traits_of_pages(each, name) for each in value]
        return {f"{name}: {len(value) > 0}"}.union(*inner)
    if isinstance(value, str):
        value = "a name"
    if isinstance(value, int | float) and value not in (0, 1):
        value = "a number"
    return {f"{name} = {value}"}


def test_those_that_run_always_have_every_kind_of_page_and_module():
    traits = {}
    for family, name in OF_FAMILY.items():
        config = config_json(name, **sizes_of(name))
        module = load_family(config)
        spec = module.Spec.from_config(config)
        model = make_model(module, spec, "float32", None)
        kinds = {type(each).__name__ for _, each in nnx.iter_modules(model) if each is not model}
        traits[family] = traits_of_pages(spec.kv) | kinds - BY_TOKEN
    assert len(set().union(*traits.values())) > 50
    always = set().union(*(traits[family] for family in ALWAYS))
    lacking = {family: these - always for family, these in traits.items()}
    assert {family: these for family, these in lacking.items() if these} == {}


def lone_tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Returns the tokens of each request by itself, with nothing cached."""
    tokens = []
    for request in zip(prompts, params, strict=True):
        llm.reset_prefix_cache()
        tokens += tokens_of(llm.generate(*request, use_tqdm=False))
    llm.reset_prefix_cache()
    return tokens


@pytest.mark.parametrize(
    ("name", "alone"),
    few(
        itertools.product(MODELS, ("in the same engine", "token by token")),
        [(OF_FAMILY[family], "in the same engine") for family in ALWAYS],
    ),
)
def test_tokens_are_those_of_transformers_and_no_bit_depends_on_the_engine(name, alone, tmp_path):
    """Requests run alone; then in chunks beside others, preempted, with prefixes and drafts.

    In a sweep another engine, with other blocks, runs them alone token by token.
    """
    model = save_model(name, tmp_path, **sizes_of(name))
    model.generation_config.eos_token_id = None
    params = [
        SamplingParams(temperature=heat, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
        for heat in (0.0, 0.9, 0.9, 0.0)
    ]
    prompts = [
        np.random.default_rng(8).integers(1, 90, length).tolist() for length in PROMPT_LENGTHS
    ]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with make_llm(tmp_path, **TIGHT, speculative_config=drafts, largest_shapes=True) as llm:
        without_drafts(llm)
        if alone == "in the same engine":
            expected = lone_tokens(llm, prompts, params)
        else:
            with make_llm(tmp_path, **TOKEN_BY_TOKEN) as other:
                expected = lone_tokens(other, prompts, params)
        check_requests(llm, model, name, prompts, params, expected)


def check_requests(
    llm: LLM,
    model: Any,
    name: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    expected: list[Any],
) -> None:
    """Compares what requests gave alone with transformers, and with the same beside others."""
    assert len({tuple(tokens) for tokens, _ in expected}) == len(prompts)
    assert_as_transformers(model, name, prompts, expected)
    output_of = {
        tuple(prompt): [tokens] for prompt, (tokens, _) in zip(prompts, expected, strict=True)
    }
    engine = llm._engine
    for turn in ("computed", "with prefixes in the cache", "with drafts"):
        if turn == "with drafts":
            vocab_size = engine.builder.vocab_size
            draft_with(engine, SyntheticProposer(output_of, (0.7, 0.5, 0.3), vocab_size=vocab_size))
        requests = zip(prompts, params, strict=True)
        reporters = [
            engine.add(f"{turn} {n}", engine.prepare(None, *request))
            for n, request in enumerate(requests)
        ]
        for number in itertools.count():
            if number in (3, 6, 9):
                engine.scheduler.give_way()
            if not engine.has_unfinished:
                break
            engine.step()
        assert tokens_of([reporter.whole() for reporter in reporters]) == expected, turn
    stats = llm.stats()
    assert stats["num_preemptions_total"]["recompute"] >= 6
    assert stats["prefix_cache_hits_total"] >= 80
    drafted, accepted = (
        stats[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")
    )
    assert 5 < accepted < drafted - 5
    invariants(llm)


HALVED = itertools.product(["llama-grouped", "gpt2-usual", "opt-plain"], ["bfloat16", "float16"])


@pytest.mark.parametrize("runs_in", ["float32", pytest.param("half", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("name", "dtype"), few(HALVED, [("llama-grouped", "bfloat16")]))
def test_half_precision_weights_load_and_run(name, dtype, runs_in, tmp_path):
    model = save_model(name, tmp_path, dtype=getattr(torch, dtype)).float()
    prompt = list(range(1, 20))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    with make_llm(tmp_path, **TIGHT, dtype=dtype if runs_in == "half" else "float32") as llm:
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 8
    if runs_in == "float32":
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert output.token_ids == generated[0, len(prompt) :].tolist()
    first = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
    chosen = output.token_ids[0]
    # transformers' model has rounded the frequencies of its rope, too
    assert abs(output.logprobs[0][chosen].logprob - float(first[chosen])) < 0.15
