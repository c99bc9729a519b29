"""Vectors take the place of tokens: rows of the table give the bits of the tokens in every path,
other rows what transformers gives.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxpage import AsyncLLM, SamplingParams
from jaxpage.checkpoints.finding.resolve import DEMO
from jaxpage.errors import UnsupportedError
from jaxpage.memory import PrefixIndex, words_of
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Vectors
from jaxpage.step.events import Events
from tests.support.engines import (
    BLOCKS_OF_4,
    LLAMA,
    SMALL_POOL,
    invariants,
    make_kind,
    make_llm,
    run_giving_way,
    tokens_of,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
PARAMS = SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True, logprobs=3
)
GREEDY = dataclasses.replace(PARAMS, temperature=0.0, top_p=1.0)
FAMILIES = {
    "llama": LLAMA,
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 96,
        "word_embed_proj_dim": 48,
        "ffn_dim": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "vocab_size": 257,
        "max_position_embeddings": 256,
        "do_layer_norm_before": False,
    },
    "gemma2": {
        **{**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16},
        **{"sliding_window": 20, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    },
    "granite": {
        **{**LLAMA, "architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        "embedding_multiplier": 12.0,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 257,
        "seq_length": 256,
    },
}
ENGINES = {
    "recompute": SMALL_POOL,
    "swap": {**SMALL_POOL, "preemption_mode": "swap", "enable_prefix_caching": False},
    "mixed, fair": {**SMALL_POOL, "enable_mixed_steps": True, "scheduling_policy": "fair"},
    "blocks of 4": BLOCKS_OF_4,
    "several steps": {"num_scheduler_steps": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def directory(family):
        if family not in made:
            made[family] = random_checkpoint(tmp_path_factory.mktemp(family), FAMILIES[family])
        return made[family]

    return directory


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    drawn = [rng.integers(1, 257, length).tolist() for length in (5, 61, 33, 100, 1, 90)]
    return [*drawn, drawn[1][:40] * 2]


def table_of(llm):
    """Returns the embeddings of the tokens that transformers gives, in the type of the engine."""
    weights = load_file(Path(llm.config.model) / "model.safetensors")
    (table,) = (
        weights[name]
        for name in weights
        if name.endswith(("embed_tokens.weight", "word_embeddings.weight"))
    )
    scale = np.sqrt(table.shape[1]) if "gemma2" in llm.config.model else 1
    return table * table.dtype.type(scale)


def as_vectors(llm, prompts):
    table = table_of(llm)
    return [{"prompt_embeds": table[prompt]} for prompt in prompts]


def mix(llm, token_ids, spans):
    """Returns the tokens of a prompt, some of which the table's rows take the place of."""
    rows = table_of(llm)[token_ids]
    ids = list(token_ids)
    parts, sources = [], {}
    for number, (start, stop) in enumerate(spans):
        key = bytes([number]) * 32
        sources[key] = Vectors(rows[start:stop])
        parts.append(EmbeddedSpan(start, stop - start, key))
        ids[start:stop] = [0] * (stop - start)
    return ids, EmbeddedPrompt(tuple(parts), sources)


@pytest.fixture(scope="module")
def llm(directories):
    with make_llm(directories("llama"), enable_prompt_embeds=True) as llm:
        yield llm
        invariants(llm)


@pytest.fixture(scope="module")
def alone(directories, prompts):
    """Returns what each prompt of tokens gives by itself, in an engine that takes no vectors."""
    known = {}

    def run_alone(family, params=PARAMS):
        key = family, params.temperature
        if key not in known:
            with make_llm(directories(family), enable_prefix_caching=False) as llm:
                outputs = [llm.generate(p, [params], use_tqdm=False)[0] for p in prompts]
            known[key] = tokens_of(outputs)
        return known[key]

    return run_alone


@pytest.mark.parametrize("family", few(["llama", "opt", "gemma2"], ["llama"]))
def test_the_tables_rows_are_the_tokens(family, directories, prompts, alone):
    with make_llm(directories(family), enable_prompt_embeds=True) as llm:
        vectors = as_vectors(llm, prompts)
        singly = [llm.generate(each, PARAMS, use_tqdm=False)[0] for each in vectors]
        assert tokens_of(singly) == alone(family)
        both = [each for pair in zip(prompts, vectors, strict=True) for each in pair]
        for _ in range(2):  # the second time prefixes are found
            together = tokens_of(llm.generate(both, PARAMS, use_tqdm=False))
            assert together[::2] == together[1::2] == alone(family)
        invariants(llm)


@pytest.mark.parametrize("engine", few(ENGINES, ["mixed, fair"]))
def test_every_path(engine, directories, prompts, alone):
    params = GREEDY if engine == "drafts" else PARAMS
    expected = alone("llama", params)
    with make_llm(directories("llama"), enable_prompt_embeds=True, **ENGINES[engine]) as llm:
        both = [*as_vectors(llm, prompts), *prompts[::-1]]
        for _ in range(2):
            together = tokens_of(llm.generate(both, params, use_tqdm=False))
            assert together[: len(prompts)] == together[: len(prompts) - 1 : -1] == expected
        stats = llm.stats()
        if engine in ("recompute", "swap"):
            assert stats["num_preemptions_total"][engine] >= 1
        if engine == "drafts":
            assert stats["spec_decode_num_draft_tokens_total"] > 0
        invariants(llm)


@pytest.mark.parametrize("mode", few(["recompute", "swap"], ["swap"]))
def test_tokens_and_vectors_in_one_prompt(mode, directories, prompts, alone):
    """The cuts between chunks are before, in and after the vectors, and the request is preempted at
    every step.
    """
    settings = {
        "max_num_batched_tokens": 16,
        "preemption_mode": mode,
        "enable_prefix_caching": False,
    }
    with make_llm(directories("llama"), enable_prompt_embeds=True, **settings) as llm:
        engine = llm._engine
        for spans in (((3, 21),), ((0, 1), (16, 32), (60, 61)), ((0, 17), (17, 40))):
            ids, embedded = mix(llm, prompts[1], spans)
            for step in (2, 3, 8):
                engine.add("older", engine.prepare(None, prompts[0], PARAMS))
                reporter = engine.add("watched", engine.prepare(None, ids, PARAMS, embedded))
                run_giving_way(engine, step)
                assert tokens_of([reporter.whole()]) == [alone("llama")[1]]
        assert llm.stats()["num_preemptions_total"][mode] >= 6
        invariants(llm)


def test_samples_of_a_prompt_that_ends_with_a_vector(llm, prompts):
    """More samples than a step of chunks has rows compute its last token when all draw."""
    many = dataclasses.replace(PARAMS, n=4, max_tokens=6)
    (of_tokens,) = llm.generate([prompts[2]], many, use_tqdm=False)
    (of_vectors,) = llm.generate(as_vectors(llm, [prompts[2]]), many, use_tqdm=False)
    assert [each.token_ids for each in of_vectors.outputs] == [
        each.token_ids for each in of_tokens.outputs
    ]


def test_prefixes_are_found_by_the_vectors(llm, prompts):
    llm.reset_prefix_cache()
    rows = table_of(llm)[prompts[1]]
    changed = rows.copy()
    changed[20] += 0.01

    def num_cached(prompt):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        return output.metrics.num_cached_tokens

    assert num_cached({"prompt_embeds": rows}) == 0
    assert num_cached({"prompt_embeds": rows}) == 48
    # The key is that of the whole array, so other arrays share nothing.
    assert num_cached({"prompt_embeds": changed}) == 0
    assert num_cached([0] * 61) == 0 and num_cached(prompts[1]) == 0
    assert num_cached([0] * 61) == 48
    with llm.pin_prefix({"prompt_embeds": rows}):
        llm.reset_prefix_cache()
        assert num_cached({"prompt_embeds": rows}) == 60
        assert num_cached([0] * 61) == 0


def test_prefixes_outlive_the_engine(directories, prompts, tmp_path, alone):
    settings = {"enable_prompt_embeds": True, "prefix_cache_directory": str(tmp_path)}
    for num_cached in (0, 48):
        with make_llm(directories("llama"), **settings) as llm:
            (prompt,) = as_vectors(llm, [prompts[1]])
            (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
            assert output.metrics.num_cached_tokens == num_cached
            assert tokens_of([output]) == [alone("llama")[1]]


@pytest.mark.parametrize(
    "family", few(["llama", "opt", "gemma2", "granite", "bloom"], ["opt", "gemma2", "bloom"])
)
def test_transformers_gives_the_same(family, directories):
    """The rows are no token's. OPT projects its rows, Gemma 2 has a factor, and Bloom a norm."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    width = FAMILIES[family].get("word_embed_proj_dim", 64)
    rows = np.random.default_rng(1).standard_normal((23, width), dtype=np.float32)
    model = AutoModelForCausalLM.from_pretrained(
        directories(family), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(inputs_embeds=torch.tensor(rows)[None]).logits[0, -1]
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    with make_llm(directories(family), enable_prompt_embeds=True) as llm:
        (output,) = llm.generate(
            {"prompt_embeds": torch.tensor(rows)},
            SamplingParams(temperature=0.0, max_tokens=1, logprobs=8),
            use_tqdm=False,
        )
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - expected[token_id]) < 2e-4


def test_penalties_do_not_count_placeholders(llm, prompts):
    """A prompt of vectors has no tokens that a text could repeat."""
    penalised = dataclasses.replace(GREEDY, repetition_penalty=5.0, max_tokens=1)
    biased = dataclasses.replace(penalised, logit_bias={0: 20.0})
    (prompt,) = as_vectors(llm, [prompts[1]])
    (output,) = llm.generate(prompt, biased, use_tqdm=False)
    assert output.outputs[0].token_ids == [0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.zeros((3, 65), np.float32), r"shape \(3, 65\); it must be \(T, 64\)"),
        (np.zeros((64,), np.float32), r"shape \(64,\)"),
        (np.zeros((0, 64), np.float32), r"shape \(0, 64\)"),
        (np.zeros((3, 64), np.int32), "floating-point numbers, got int32"),
        (np.array([[1.0] * 63 + [np.nan], [np.inf] * 64]), "65 numbers of 128 that are not finite"),
        (np.zeros((256, 64), np.float32), "256 tokens, which leaves no room"),
    ],
)
def test_wrong_vectors_are_refused(values, text, llm):
    with pytest.raises(ValueError, match=text):
        llm.generate({"prompt_embeds": values}, GREEDY, use_tqdm=False)


def test_what_is_not_possible_is_refused(directories, llm):
    rows = {"prompt_embeds": np.zeros((3, 64), np.float32)}
    with (
        make_llm(directories("llama")) as plain,
        pytest.raises(UnsupportedError, match="needs enable_prompt_embeds=True"),
    ):
        plain.generate(rows, GREEDY, use_tqdm=False)
    with pytest.raises(UnsupportedError, match="prompt_logprobs=1 is not possible"):
        llm.generate(rows, dataclasses.replace(GREEDY, prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(TypeError, match="unknown keys"):
        llm.generate({**rows, "prompt": "a"}, GREEDY, use_tqdm=False)
    with pytest.raises(UnsupportedError, match="embed takes texts and token ids"):
        llm.embed(rows, use_tqdm=False)


def test_async(directories, prompts, alone):
    async def run():
        async with make_kind(AsyncLLM, directories("llama"), enable_prompt_embeds=True) as llm:
            (prompt,) = as_vectors(llm, [prompts[1]])
            return [output async for output in llm.generate(prompt, PARAMS)][-1]

    output = asyncio.run(run())
    assert tokens_of([output]) == [alone("llama")[1]]


class Drafts(Events):
    """The drafts of each step."""

    def __init__(self):
        self.of_steps = []

    def planned(self, plan):
        self.of_steps.append([row.token_ids[1:] for row in plan.rows if row.parents])


def test_a_head_of_the_model_drafts_from_the_vectors():
    """It drafts the same as from the tokens whose rows they are."""
    drafting = {"method": "mtp", "num_speculative_tokens": 1}
    params = dataclasses.replace(GREEDY, max_tokens=16, logprobs=None)
    with make_llm("demo", enable_prompt_embeds=True, speculative_config=drafting) as llm:
        table = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"]
        ids = llm.get_tokenizer()("One day a clever fox met a hare")["input_ids"]
        results = []
        for prompt in ({"prompt_token_ids": ids}, {"prompt_embeds": table[ids]}):
            llm._engine.events = drafts = Drafts()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            results.append((output.outputs[0].token_ids, drafts.of_steps))
    assert results[0] == results[1] and any(results[0][1])


_KEYS = st.integers(0, 3).map(lambda number: bytes([number]) * 32)
_NUMBERS = st.one_of(
    st.integers(0, 2**31 - 1),
    st.builds(
        lambda key, offset: EmbeddedSpan(0, 1, key, offset).content_ids[0], _KEYS, st.integers(0, 5)
    ),
)


@given(st.lists(_NUMBERS, min_size=4, max_size=4), st.lists(_NUMBERS, min_size=4, max_size=4))
def test_contents_have_words_of_their_own(first, second):
    assert (words_of(first).tolist() == words_of(second).tolist()) == (first == second)


@given(st.lists(_NUMBERS, min_size=1, max_size=20), st.integers(0, 1), st.integers(0, 20))
def test_digests_do_not_depend_on_when_they_are_made(numbers, num_following, first):
    index = PrefixIndex(2, num_following=num_following)
    maximum = max(0, (len(numbers) - num_following) // 2)
    at_once = index.extend([], numbers, "salt", maximum)
    bit_by_bit = index.extend([], numbers, "salt", min(first, maximum))
    assert index.extend(bit_by_bit, numbers, "salt", maximum) == at_once
