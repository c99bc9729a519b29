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
from tests.support.engines import LogitsWitness, invariants, make_llm, tokens_of  # noqa: E402
from tests.support.family_names import FAMILY_OF  # noqa: E402
from tests.support.hf_models import MODELS, config_json, save_model  # noqa: E402
from tests.support.model_forms import SIZES  # noqa: E402
from tests.support.random_checkpoints import random_checkpoint  # noqa: E402
from tests.support.scripted import draft_with, without_drafts  # noqa: E402
from tests.support.sweeps import few  # noqa: E402
from tests.support.synthetic import SyntheticProposer  # noqa: E402

PROMPT_LENGTHS = (3, 41, 17, 30)
NUM_TOKENS = 14
# Of each family. The numbers of all configurations are compared in tests/test_models.py; here it is
# what the engine makes of them.
ONE_OF_EACH = (
    *(
        "llama-grouped",
        "mistral-window",
        "qwen2-layer-types",
        "qwen3-windows",
        "opt-350m-form",
        "gpt2-usual",
    ),
    *(
        "gemma2-caps",
        "gemma3-types",
        "gemma4-shared",
        "gemma3n-shared",
        "cohere2-parallel",
        "olmo3-windows",
        "glm4-interleaved",
        "falcon-grouped",
    ),
    *("gpt-oss-windows", "deepseek-v2-groups", "deepseek-v3-groups", "qwen3-5-mixed"),
    *("granitemoehybrid-mixed", "lfm2-mixed", "llama4-chunks"),
)
# These keep their pages as others of them do, and differ in what tests/test_models.py compares.
KEPT_ALIKE = {"qwen2-layer-types", "glm4-interleaved", "falcon-grouped", "olmo3-windows"}
# Chunks of 16 tokens cut every long prompt; 17 blocks of 4 do not hold the first two sequences to
# their end.
TIGHT = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 18,
    "max_model_len": 60,
}
ALONE = {
    "the same": TIGHT,
    "token by token": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "block_size": 1,
        "num_blocks": 61,
        "max_model_len": 60,
    },
}
SIXTEEN = {"hidden_size": 64, "head_dim": 16}
# A model of each family, one of the above where there is one: engines of the same model share what
# is compiled.
OF_FAMILY = {
    FAMILY_OF[config_json(name)["architectures"][0]]: name
    for name in (*reversed(MODELS), *ONE_OF_EACH)
}
# More of these is shown always, by tests/test_path_independence.py, tests/test_speculation.py and
# tests/test_recurrent.py.
ELSEWHERE = {"llama", "mistral", "opt", "qwen3_5"}
# Of the others these, which have every trait of all; the rest in a sweep.
ALWAYS = (
    *("afmoe", "apertus", "bloom", "codegen", "cohere", "deepseek_v2", "deepseek_v3", "exaone4"),
    *("falcon_h1", "falcon_mamba", "gemma2", "gemma3n", "gemma4", "gpt2", "gpt_oss"),
    *("granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm3", "llama4", "mamba"),
    *("mimo_v2_flash", "ministral3", "mistral4", "nanochat", "nemotron", "nemotron_h", "olmo"),
    *("olmo3", "olmo_hybrid", "olmoe", "phimoe", "qwen3_next", "stablelm", "starcoder2", "xglm"),
    "zamba2",
)
# Attributes of modules that say nothing of their operations.
PASSED_OVER = ("config", "name", "layer_index", "index", "convolution_index")
KINDS = ("activation", "kind", "norm")


@torch.no_grad()
def greedy_with_logits(model, prompt, num_tokens):
    """Transformers' own forward over the growing sequence: tokens, and the logits of each."""
    ids, logits = list(prompt), []
    for _ in range(num_tokens):
        row = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        logits.append(row)
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], logits


@pytest.mark.parametrize("name", few(MODELS, {*ONE_OF_EACH} - KEPT_ALIKE))
def test_tokens_and_logits_are_those_of_transformers(name, tmp_path):
    model = save_model(name, tmp_path)
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(3)
    prompts = [
        rng.integers(0, model.config.get_text_config().vocab_size, length).tolist()
        for length in PROMPT_LENGTHS
    ]
    with make_llm(tmp_path, **TIGHT) as llm:
        witness = LogitsWitness(llm)
        outputs = llm.generate(
            prompts,
            SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
            use_tqdm=False,
        )
        invariants(llm)
        if (
            llm._engine.scheduler.block_manager.groups[0].sliding_window is None
        ):  # else blocks that fell out of the window are enough
            assert llm.stats()["num_preemptions_total"]["recompute"] > 0
    # torch computes recurrences in chunks
    chunked = ("qwen3-5", "qwen3-next", "granitemoehybrid", "zamba2", "olmo-hybrid", "kimi-linear")
    tolerance = 2e-4 if name.startswith(chunked) else 1e-4
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, logits = greedy_with_logits(model, prompt, NUM_TOKENS)
        assert output.outputs[0].token_ids == tokens
        for place, row in enumerate(logits):
            np.testing.assert_allclose(
                witness.logits[index, len(prompt) + place], row, atol=tolerance
            )


def test_there_is_a_model_of_each_family():
    assert OF_FAMILY.keys() == set(FAMILY_OF.values())


def family_and_config(family: str) -> tuple[Any, dict[str, Any]]:
    name = OF_FAMILY[family]
    # Heads of 16 are those of the kernel for CPUs, which compiles faster than what takes its place.
    sizes = {} if name in ONE_OF_EACH or family in SIZES else SIXTEEN
    config = config_json(name, **sizes)
    return load_family(config), config


def traits(value: Any, name: str) -> set[str]:
    """What decides which operations a model has: kinds, flags, and which numbers are given, but not how large they are."""
    if dataclasses.is_dataclass(value):
        fields = [
            field.name for field in dataclasses.fields(value) if field.name not in PASSED_OVER
        ]
        inner = [traits(getattr(value, field), f"{name}.{field}") for field in fields]
        return {f"{name}: {type(value).__name__}"}.union(*inner)
    if isinstance(value, tuple):
        return {f"{name}: {len(value) > 0}"}.union(*(traits(each, name) for each in value))
    if isinstance(value, str) and not name.endswith(KINDS):
        value = "a name"
    if isinstance(value, int | float) and value not in (0, 1):
        value = "a number"
    return {f"{name} = {value}"}


def traits_of_model(model: Any) -> set[str]:
    """The kinds of its modules, what each of them holds, and the methods that its family overrides."""
    found = {getattr(type(model), name).__qualname__ for name in ("__call__", "embed", "logits")}
    for _, module in nnx.iter_modules(model):
        kind = "model" if module is model else type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, nnx.Module | nnx.Variable):
                found.add(f"{kind}.{name}: {type(value).__name__}")
            elif name not in PASSED_OVER and not name.startswith("_"):
                found |= traits(value, f"{kind}.{name}")
    return found


def test_those_that_run_always_have_every_trait_of_all():
    found = {}
    for family in OF_FAMILY:
        module, config = family_and_config(family)
        spec = module.Spec.from_config(config)
        model = make_model(module, spec, "float32", None)
        found[family] = traits(spec.kv, "kv") | traits_of_model(model)
    assert len(set().union(*found.values())) > 200
    kept = set().union(*(found[family] for family in {*ALWAYS, *ELSEWHERE}))
    assert {family: own - kept for family, own in found.items() if own - kept} == {}


class BesideOthers(SyntheticProposer):
    """Drafts where two requests run: for one alone the engine would need another executable."""

    def __init__(self, engine, known):
        super().__init__(known, (0.7, 0.5, 0.3), vocab_size=engine.builder.vocab_size)
        self._scheduler = engine.scheduler

    def propose(self, request, sequence, num_drafts):
        return (
            super().propose(request, sequence, num_drafts)
            if self._scheduler.num_running > 1
            else None
        )


@pytest.mark.parametrize(
    ("family", "alone"),
    few(
        itertools.product(sorted(OF_FAMILY), ALONE),
        [(family, "the same") for family in ALWAYS],
    ),
)
def test_no_bit_depends_on_the_engine(family, alone, tmp_path):
    """Alone; then in chunks beside others, preempted, behind prefixes and drafts. In a sweep also with other blocks, token by token."""
    _, config = family_and_config(family)
    random_checkpoint(tmp_path, config)
    params = [
        SamplingParams(temperature=heat, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
        for heat in (0.0, 0.9, 0.9, 0.0)
    ]
    prompts = [
        np.random.default_rng(8).integers(1, 90, length).tolist() for length in PROMPT_LENGTHS
    ]
    with make_llm(tmp_path, **ALONE[alone], enable_prefix_caching=False) as llm:
        want = [
            tokens_of(llm.generate(*one, use_tqdm=False))[0]
            for one in zip(prompts, params, strict=True)
        ]
    assert len({tuple(tokens) for tokens, _ in want}) == len(prompts)
    known = {tuple(prompt): [tokens] for prompt, (tokens, _) in zip(prompts, want, strict=True)}
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with make_llm(tmp_path, **TIGHT, speculative_config=drafts) as llm:
        engine = llm._engine
        without_drafts(llm)
        for turn in ("computed", "with prefixes in the cache", "with drafts"):
            if turn == "with drafts":
                draft_with(engine, BesideOthers(engine, known))
            requests = zip(prompts, params, strict=True)
            reporters = [
                engine.add(f"{turn} {n}", engine.prepare(None, *one))
                for n, one in enumerate(requests)
            ]
            for number in itertools.count():
                if number in (3, 6, 9):
                    engine.scheduler.give_way()
                if not engine.has_unfinished:
                    break
                engine.step()
            assert tokens_of([reporter.whole() for reporter in reporters]) == want, turn
        stats = llm.stats()
        assert stats["num_preemptions_total"]["recompute"] >= 6
        assert stats["prefix_cache_hits_total"] >= 80
        drafted, accepted = (
            stats[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")
        )
        assert 5 < accepted < drafted - 5
        invariants(llm)


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
    with LLM(
        str(tmp_path), dtype=dtype, use_tqdm=False, num_blocks=20, max_model_len=60, **settings
    ) as llm:
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 8
        first = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
        chosen = output.token_ids[0]
        assert abs(output.logprobs[0][chosen].logprob - float(first[chosen])) < 0.15
