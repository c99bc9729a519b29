"""The same request gives the same tokens, alone or among strangers, however chunked, preempted,
cached or cut into blocks.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.decoding import SamplingStrategy
from jaxpage.engine.text import NoText
from jaxpage.step.edits import Fork
from tests.support.engines import (
    BLOCKS_OF_1,
    BLOCKS_OF_4,
    GRANITE_4,
    LFM2,
    LLAMA,
    QWEN3_5,
    SMALL_POOL,
    WIDE,
    invariants,
    make_llm,
    run_giving_way,
    steps_by_hand,
    tokens_of,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few

NUM_TOKENS = 40
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3),
    "seeded": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        seed=11,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=3,
    ),
}
FAMILIES = {
    "llama": LLAMA,
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 96,
        "word_embed_proj_dim": 96,
        "ffn_dim": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "vocab_size": 257,
        "max_position_embeddings": 256,
    },
    "mistral": {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 20,
    },
    "qwen3": {
        **LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
    },
    "gemma2": {
        **{**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16},
        **{"sliding_window": 20, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    },
    "cohere2": {
        **{
            **LLAMA,
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "num_hidden_layers": 3,
        },
        **{"sliding_window": 20, "sliding_window_pattern": 3, "logit_scale": 1.0},
    },
    "gpt_oss": {
        **{
            **LLAMA,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "head_dim": 16,
        },
        **{"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "deepseek_v3": {
        **{
            **LLAMA,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "kv_lora_rank": 32,
        },
        **{
            "q_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 8,
        },
        **{
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    },
    "qwen3_5": QWEN3_5,
    "granite_4": GRANITE_4,
    "lfm2": LFM2,
    "mixtral": {
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
    },
}
NEWER = (
    *("qwen3", "gemma2", "cohere2", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_5"),
    *("granite_4", "lfm2"),
)
# Engines that differ in everything that must not matter.
ENGINES = {
    "plain": {},
    "blocks of 1": BLOCKS_OF_1,
    "blocks of 4": BLOCKS_OF_4,
    "blocks of 32": {"block_size": 32, "num_blocks": 65},
    "wide": WIDE,
    "narrow chunks": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
    "small pool": SMALL_POOL,
    "swapping": {**SMALL_POOL, "preemption_mode": "swap"},
    "fair and mixed": {
        **SMALL_POOL,
        "scheduling_policy": "fair",
        "enable_mixed_steps": True,
        "new_requests_wait_until": "completed",
    },
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {
        name: random_checkpoint(tmp_path_factory.mktemp(name), config)
        for name, config in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(1, 257, length).tolist() for length in (5, 61, 33, 120, 2, 90)]


class LoneTokens(dict):
    """Holds the tokens of each request by itself, with nothing cached; they are made when a family
    is first asked for.
    """

    def __init__(self, directories, prompts):
        self.directories, self.prompts = directories, prompts

    def __missing__(self, key):
        family, _ = key
        with make_llm(self.directories[family], enable_prefix_caching=False) as llm:
            for kind, params in KINDS.items():
                outputs = [llm.generate(prompt, params, use_tqdm=False) for prompt in self.prompts]
                self[family, kind] = [tokens_of(output)[0] for output in outputs]
        return self[key]


@pytest.fixture(scope="module")
def lone_tokens(directories, prompts):
    return LoneTokens(directories, prompts)


def test_the_requests_differ(lone_tokens):
    """Otherwise equality would show nothing."""
    for tokens in [lone_tokens[family, kind] for family in ("llama", "mistral") for kind in KINDS]:
        assert len({tuple(ids) for ids, _ in tokens}) == len(tokens)
    assert lone_tokens["llama", "greedy"] != lone_tokens["llama", "seeded"]
    assert lone_tokens["mistral", "greedy"] != lone_tokens["llama", "greedy"]


@pytest.mark.parametrize(
    ("family", "engine"),
    few(
        [("llama", engine) for engine in ENGINES]
        + [
            ("opt", "small pool"),
            ("mistral", "blocks of 4"),
            ("mistral", "tiny pool"),
            ("mistral", "swapping"),
        ]
        + [("mistral", "odd budget"), ("mistral", "tiny and swapping")]
        + [
            (family, engine)
            for family in NEWER
            for engine in ("blocks of 4", "small pool", "swapping", "wide")
        ]
        + [("qwen3_5", engine) for engine in ("blocks of 1", "blocks of 32", "fair and mixed")],
        [
            *[("llama", engine) for engine in ("small pool", "fair and mixed", "swapping")],
            ("mistral", "tiny and swapping"),
        ],
    ),
)
def test_together_as_alone(family, engine, directories, prompts, lone_tokens):
    # 15 blocks of 4: the longest sequence has 160 tokens, of which a window of 20 and a chunk of 16
    # have to stay.
    tiny = {**BLOCKS_OF_4, **SMALL_POOL, "num_blocks": 16}
    # chunks that are no whole blocks
    odd = {"max_num_seqs": 4, "num_blocks": 12, "max_num_batched_tokens": 20}
    away = {**tiny, "preemption_mode": "swap", "enable_mixed_steps": True}
    settings = {**ENGINES, "tiny pool": tiny, "odd budget": odd, "tiny and swapping": away}[engine]
    with make_llm(directories[family], **settings) as llm:
        for kind, params in KINDS.items():
            assert (
                tokens_of(llm.generate(prompts, params, use_tqdm=False))
                == lone_tokens[family, kind]
            )
        kinds = [("seeded", "greedy")[index % 2] for index in range(len(prompts))]
        reverse = llm.generate(prompts[::-1], [KINDS[kind] for kind in kinds[::-1]], use_tqdm=False)
        assert tokens_of(reverse)[::-1] == [
            lone_tokens[family, kind][index] for index, kind in enumerate(kinds)
        ]
        preempted = llm.stats()["num_preemptions_total"]
        if family in ("llama", "opt") and engine in ("small pool", "swapping"):
            assert preempted["swap" if engine == "swapping" else "recompute"] >= 3
        if engine == "tiny pool":
            assert llm.memory.num_slots < max(map(len, prompts)) < llm.memory.max_model_len
        invariants(llm)


@pytest.mark.parametrize(
    ("family", "mode"),
    few(
        itertools.product(("llama", "mistral", "qwen3_5"), ("swap", "recompute")),
        [("llama", "swap")],
    ),
)
def test_gives_way_at_every_step(family, mode, directories, prompts, lone_tokens):
    """A request gives way in the middle of its prompt, at its first token, later: swapped or
    recomputed, its tokens and their probabilities stay.
    """
    settings = {
        "preemption_mode": mode,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16,
    }
    with make_llm(directories[family], **settings) as llm:
        engine = llm._engine
        for step in range(2, 16):
            kind = [*KINDS][step % 2]
            older, watched = (
                dataclasses.replace(KINDS[kind], max_tokens=length) for length in (16, 8)
            )
            engine.add("older", engine.prepare(None, prompts[0], older))
            reporter = engine.add("watched", engine.prepare(None, prompts[2], watched))
            run_giving_way(engine, step)
            ((token_ids, logprobs),) = tokens_of([reporter.whole()])
            expected_ids, expected_logprobs = lone_tokens[family, kind][2]
            assert (token_ids, logprobs) == (expected_ids[:8], expected_logprobs[:8])
        assert llm.stats()["num_preemptions_total"][mode] >= 8
        invariants(llm)


class Forking(SamplingStrategy):
    """After `fork_at` tokens a twin goes on with the same noise: it must say what its elder
    says.
    """

    def __init__(self, request, fork_at, child_id):
        super().__init__(request, lambda: NoText())
        self._fork_at, self._child_id, self.num_tokens = fork_at, child_id, 0

    def _advance(self, draw):
        edits, sequence_id = super()._advance(draw), draw.sequence_id
        self.num_tokens += 1
        if self.num_tokens == self._fork_at:
            self._stopping_of[self._child_id] = copy.deepcopy(self._stopping_of[sequence_id])
            edits.append(Fork(sequence_id, self._child_id, 0))
        return edits


@pytest.mark.parametrize("mode", few(["auto", "recompute"], ["auto"]))
def test_forked_or_run_again(mode, directories, prompts, lone_tokens):
    """A fork that shares its elder's blocks, swapped with it or recomputed without it, draws what a
    run of its own draws.
    """
    with make_llm(directories["llama"], preemption_mode=mode) as llm:
        engine = llm._engine
        for fork_at, kind in zip((1, 2, 9, 24), [*KINDS] * 2, strict=True):
            params = KINDS[kind]
            engine.add(
                "older",
                engine.prepare(None, prompts[0], dataclasses.replace(params, max_tokens=60)),
            )
            reporter = engine.add(
                "watched", engine.prepare(None, prompts[2], dataclasses.replace(params, n=2))
            )
            (group,) = (g for g in engine.scheduler.waiting if g.request.request_id == "watched")
            # the strategy forks it, not the first draw
            (child_id,), group.child_ids = group.child_ids, ()
            strategy = Forking(group.request, fork_at, child_id)
            engine._strategies |= dict.fromkeys(
                (group.sequences[0].sequence_id, child_id), strategy
            )
            while engine.has_unfinished:
                engine.step()
                if strategy.num_tokens in (fork_at, fork_at + 6):
                    engine.scheduler.give_way()
            elder, twin = reporter.whole().outputs
            assert elder.token_ids == twin.token_ids == lone_tokens["llama", kind][2][0]
        stats = llm.stats()
        # what is recomputed is shared no more
        assert (stats["copy_on_write_blocks_total"] > 0) == (mode == "auto")
        assert stats["num_preemptions_total"]["swap" if mode == "auto" else "recompute"] >= 4
        invariants(llm)


def test_pinned_or_not(directories, prompts, lone_tokens):
    """The pinned prefix ends in the middle of a block, with and without a cache beside it."""
    for caching in (True, False):
        with make_llm(directories["llama"], enable_prefix_caching=caching) as llm:
            for length, kind in zip((1, 15, 16, 40, 60, 61), [*KINDS] * 3, strict=True):
                with llm.pin_prefix(prompts[1][:length]):
                    llm.reset_prefix_cache()
                    outputs = llm.generate(
                        [prompts[1], prompts[3], prompts[1]], KINDS[kind], use_tqdm=False
                    )
                    assert tokens_of(outputs) == [
                        lone_tokens["llama", kind][index] for index in (1, 3, 1)
                    ]
                    assert outputs[0].metrics.num_cached_tokens == min(length, 60)
            invariants(llm)


def mark(llm):
    """Reads counters of the prefix cache; call the result for what came since."""
    names = (
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prefix_cache_resumed_hits_total",
    )
    before = llm.stats()
    return lambda: tuple(llm.stats()[name] - before[name] for name in names)


@pytest.mark.parametrize(
    "engine",
    few(
        ["plain", "blocks of 1", "blocks of 4", "blocks of 32", "uncached"],
        ["uncached"],
    ),
)
def test_cached_or_not(engine, directories, prompts, lone_tokens):
    """Prefixes are those that nobody, a running request or a finished one computed; under a salt;
    evicted; forgotten.
    """
    settings = {**ENGINES, "uncached": {"enable_prefix_caching": False}}[engine]
    with make_llm(directories["llama"], **settings) as llm:
        params = [KINDS["greedy"], KINDS["seeded"]] * 3
        expected = [
            lone_tokens["llama", kind][index] for index, kind in enumerate(["greedy", "seeded"] * 3)
        ]
        size, num_prompt = llm.config.block_size, sum(map(len, prompts))
        num_hits = sum((len(prompt) - 1) // size * size for prompt in prompts)
        cached = engine != "uncached"
        for hits in (0, num_hits):  # computed, then revived
            since = mark(llm)
            assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == expected
            assert since() == ((num_prompt, hits, 0) if cached else (0, 0, 0))
        salted = [dataclasses.replace(param, cache_salt="pepper") for param in params]
        since = mark(llm)
        assert tokens_of(llm.generate(prompts, salted, use_tqdm=False)) == expected
        assert since()[1] == 0
        with steps_by_hand(llm), llm.stream(prompts[3], salted[1]) as running:
            next(running)  # it holds the blocks that the next two find
            both = tokens_of(llm.generate([prompts[3]] * 2, salted[:2], use_tqdm=False))
            assert both == [lone_tokens["llama", kind][3] for kind in ("greedy", "seeded")]
        llm.reset_prefix_cache()
        assert (
            tokens_of(llm.generate(prompts[::-1], params[::-1], use_tqdm=False))[::-1] == expected
        )
        invariants(llm)


@pytest.fixture(scope="module")
def lone_blocks(directories, prompts):
    with make_llm(directories["llama"]) as llm:
        return _blocks_of(llm, prompts[3], len(prompts[3]))


@pytest.mark.parametrize(
    "engine", few(ENGINES, ["blocks of 1", "small pool", "swapping", "fair and mixed"])
)
def test_keys_and_values_are_the_same_to_the_last_bit(engine, directories, prompts, lone_blocks):
    """This is stronger than tokens: the blocks of a request hold the same however it got there."""
    with make_llm(directories["llama"], **ENGINES[engine]) as llm:
        for cut in (len(prompts[3]), 7):
            assert _blocks_of(llm, prompts[3], cut) == lone_blocks


INT8, FP8, HALF = {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("types", "geometry"),
    few(
        [
            (types, geometry)
            for types in (INT8, FP8, HALF, {**INT8, **HALF})
            for geometry in (SMALL_POOL, BLOCKS_OF_4)
        ],
        [({**INT8, **HALF}, SMALL_POOL)],
    ),
    ids=str,
)
def test_fewer_bits(types, geometry, directories, prompts, lone_tokens):
    """Keys and values have fewer bits, or everything has.

    A slot's eight bits and their scale depend on nothing but the vector, a row of a product of
    bfloat16 on nothing but the row: tokens and bits are those of the lone request.
    """
    params = [KINDS["greedy"], KINDS["seeded"]] * 3
    types = {**types, "largest_shapes": True}
    with make_llm(directories["llama"], enable_prefix_caching=False, **types) as llm:
        expected = [
            tokens_of(llm.generate(*request, use_tqdm=False))[0]
            for request in zip(prompts, params, strict=True)
        ]
        contents = {_blocks_of(llm, prompts[3], 120)}
    assert expected != [
        lone_tokens["llama", kind][index] for index, kind in enumerate(["greedy", "seeded"] * 3)
    ]
    small_pool = {**geometry, "num_blocks": 288 // geometry.get("block_size", 16)}
    with make_llm(directories["llama"], **small_pool, **types) as llm:
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == expected
        # the last are cached
        assert (
            tokens_of(llm.generate(prompts[::-1], params[::-1], use_tqdm=False))[::-1] == expected
        )
        stats = llm.stats()
        assert (
            stats["prefix_cache_hits_total"] > 100
            and stats["num_preemptions_total"]["recompute"] >= 1
        )
        contents.add(_blocks_of(llm, prompts[3], 7))
    assert len(contents) == 1


def _blocks_of(llm, prompt, cut):
    """Returns the bytes of a prompt's keys and values; its first `cut` tokens are computed before a
    stranger joins.
    """
    engine = llm._engine
    engine.add("early", engine.prepare(None, prompt[:cut], SamplingParams(max_tokens=2)))
    engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add("watched", engine.prepare(None, prompt, params))
    (group,) = (
        g
        for g in (*engine.scheduler.running, *engine.scheduler.waiting)
        if g.request.request_id == "watched"
    )
    while group.sequences[0].num_output_tokens < 20:
        engine.step()
    table = engine.scheduler.block_manager.block_tables(group.sequences[0].sequence_id)[0]
    length = group.sequences[0].num_computed_tokens
    rows = [np.asarray(page)[list(table)] for page in jax.tree.leaves(engine.runner._pages)]
    engine.abort("watched")
    engine.abort("early")
    return b"".join(
        row.reshape(-1, *row.shape[2:])[: min(length, len(prompt) + 15)].tobytes() for row in rows
    )


def test_chunks_of_8_tokens_and_of_16_give_the_same_bits(tmp_path):
    """DeepSeek's router has tiles of 16 tokens.

    XLA computes a single one together with what is around it, unless it is kept apart.
    """
    more = {
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
    }
    groups = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
    model = random_checkpoint(tmp_path, {**FAMILIES["deepseek_v3"], **more, **groups})
    prompts = [np.random.default_rng(seed).integers(5, 100, 95).tolist() for seed in range(6)]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = []
    for num_tokens in (8, 16):
        with make_llm(model, **{**BLOCKS_OF_4, "max_num_batched_tokens": num_tokens}) as llm:
            outputs.append(
                [each.prompt_logprobs for each in llm.generate(prompts, scored, use_tqdm=False)]
            )
    assert outputs[0] == outputs[1]
