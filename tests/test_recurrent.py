"""Layers with a recurrent state: no bit depends on how it came to be, and each way in which it
could is seen to matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.assembly.planning import cache_groups
from jaxpage.device import executables, recurrence, steps
from jaxpage.device.inputs.step_inputs import FIELDS, unflatten
from jaxpage.device.pages.kv_pages import StatePages
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.layers.context import Recurrence, StateSpec
from jaxpage.outputs import CompletionOutput
from tests.support.engines import (
    BLOCKS_OF_4,
    GRANITE_4,
    JAMBA,
    LFM2,
    LLAMA,
    QWEN3_5,
    invariants,
    make_llm,
    run_giving_way,
)
from tests.support.random_checkpoints import random_checkpoint, write_tensors
from tests.support.sweeps import few
from tests.test_plan import plan_of

NUM_TOKENS = 40
FEW = [5, 6, 7, 8]  # in a text of few tokens n-grams come again, and drafts are right now and then


def sample(**params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, **params)


PROMPTS = [
    np.random.default_rng(5).integers(1, 257, length).tolist() for length in (70, 3, 33, 16)
] + [FEW * 5]
REQUESTS: list[SamplingParams | BeamSearchParams] = [
    sample(temperature=0.0),
    sample(temperature=0.9, seed=3, n=3),
    BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    sample(temperature=0.0),
    sample(temperature=0.9, seed=4, n=2, allowed_token_ids=FEW),
]
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
# 56 blocks of 4 hold one of the requests at its longest, and hardly another.
TIGHT = {**BLOCKS_OF_4, "max_num_batched_tokens": 16, "max_model_len": 192, "num_blocks": 57}
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 4},
    "recomputing": TIGHT,
    "swapping": {**TIGHT, "preemption_mode": "swap"},
    "drafting": {**TIGHT, **DRAFTS},
    "drafting with EAGLE-3": {
        **TIGHT,
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
    },
    "several steps": {**TIGHT, "num_scheduler_steps": 4},
}


MODELS = {"qwen3_5": QWEN3_5, "granite_4": GRANITE_4, "lfm2": LFM2, "jamba": JAMBA}
# LFM2 has no states. Jamba has them, and apart from them the inputs of its convolutions.
GROUPS = {"lfm2": [(1 + 3, True, (0, 1))], "jamba": [(16 + 1, True, (0, 1)), (1 + 3, True, (3, 4))]}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("qwen"), QWEN3_5)


@pytest.fixture(scope="module", params=few(MODELS, ["qwen3_5"]))
def model(request, qwen, tmp_path_factory):
    if request.param == "qwen3_5":
        return qwen
    return random_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Writes an EAGLE-3 head with random weights that knows four tokens, so that it is right now
    and then.

    It takes what enters all layers.
    """
    directory, rng = tmp_path_factory.mktemp("head"), np.random.default_rng(1)
    norms = (
        "norm",
        *(
            f"layers.0.{name}"
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        ),
    )
    matmuls = {"fc": (64, 192), "lm_head": (4, 64)}
    for name, shape in (("q", (64, 128)), ("k", (32, 128)), ("v", (32, 128)), ("o", (64, 64))):
        matmuls[f"layers.0.self_attn.{name}_proj"] = shape
    for name, shape in (("gate", (160, 64)), ("up", (160, 64)), ("down", (64, 160))):
        matmuls[f"layers.0.mlp.{name}_proj"] = shape
    tensors = {f"{name}.weight": np.ones(64, np.float32) for name in norms}
    for name, shape in matmuls.items():
        tensors[f"{name}.weight"] = np.float32(rng.standard_normal(shape) / np.sqrt(shape[1]))
    write_tensors(directory, {**tensors, "d2t": np.array(FEW) - np.arange(4)})
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 4,
    }
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 0]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def engines(model, head):
    made: dict[str, LLM] = {}

    def engine(name: str) -> LLM:
        settings = dict(ENGINES[name])
        if "EAGLE" in name:
            settings["speculative_config"] = {**settings["speculative_config"], "model": str(head)}
        # several rows at once where "alone" has shapes for each number of them
        made[name] = made.get(name) or make_llm(model, largest_shapes=name != "alone", **settings)
        made[name].reset_prefix_cache()
        return made[name]

    yield engine
    for llm in made.values():
        llm.shutdown()


def texts(llm: LLM, chosen: range = range(len(PROMPTS))) -> list[Any]:
    outputs = llm.generate(
        [PROMPTS[i] for i in chosen], [REQUESTS[i] for i in chosen], use_tqdm=False
    )
    return [bits(output.outputs) for output in outputs]


def bits(outputs: list[CompletionOutput]) -> list[Any]:
    """Returns tokens and their log probabilities, which must agree to the last bit."""
    return [(output.token_ids, output.logprobs, output.cumulative_logprob) for output in outputs]


@pytest.fixture(scope="module")
def lone_texts(engines, model):
    """Returns each request by itself, with blocks of 16 and nothing cached."""
    llm = engines("alone")
    groups = next((GROUPS[name] for name in GROUPS if name in model.name), [(16 + 3, True, (0, 1))])
    assert [(group.sliding_window, group.is_state, group.layers) for group in llm.spec.groups] == [
        (None, False, (2,)),
        *groups,
    ]
    outputs = []
    for index in range(len(PROMPTS)):
        llm.reset_prefix_cache()
        outputs += texts(llm, range(index, index + 1))
    return outputs


# Drafts from the step of a recurrent model, preempted and rejected, are in
# tests/test_drafting_ahead.py, too.
@pytest.mark.parametrize(
    "name",
    few(
        [name for name in ENGINES if name != "alone"],
        ["swapping", "drafting", "several steps"],
    ),
)
def test_no_bit_depends_on_the_engine(name, engines, lone_texts):
    """Requests run in a batch, in chunks and other blocks, recomputed or swapped, forked, after
    drafts and after cached prefixes.
    """
    llm = engines(name)
    before = llm.stats()
    for turn in ("computed", "with prefixes in the cache"):
        assert texts(llm) == lone_texts, turn
        invariants(llm)
    stats = llm.stats()
    assert stats["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] >= 16
    assert stats["copy_on_write_blocks_total"] > before["copy_on_write_blocks_total"]
    mode = "swap" if name == "swapping" else "recompute"
    assert stats["num_preemptions_total"][mode] > before["num_preemptions_total"][mode]
    if "drafting" in name:
        drafted, accepted = (
            stats[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")
        )
        assert 20 < accepted < drafted - 20


def test_after_a_pinned_prefix(engines, lone_texts):
    """It ends within a block, whose state has seen more than some of what begins with it."""
    llm = engines("recomputing")
    other = PROMPTS[0][:34] + PROMPTS[2]
    expected = [
        bits(output.outputs)
        for output in engines("alone").generate([other], REQUESTS[0], use_tqdm=False)
    ]
    for length in (33, 34, 35, 37, 70):
        llm.reset_prefix_cache()
        with llm.pin_prefix(PROMPTS[0][:length]):
            assert texts(llm, range(1)) == lone_texts[:1]
            llm.reset_prefix_cache()
            (output,) = llm.generate([other], REQUESTS[0], use_tqdm=False)
            assert [bits(output.outputs)] == expected
            assert (output.metrics.num_cached_tokens >= 32) == (
                length < 70
            )  # of the longest one the last blocks are kept
    invariants(llm)


def _without_states(move: Callable[..., Any]) -> Callable[..., Any]:
    """Moves blocks, but not their states."""

    def move_rest(pages: Any, *arguments: Any, **options: Any) -> Any:
        new = move(pages, *arguments, **options)
        return tuple(
            after._replace(state=before.state) if hasattr(before, "state") else after
            for before, after in zip(pages, new, strict=True)
        )

    return move_rest


STATE = StateSpec((2, 3), input_width=3, lookback=2)
SUM = Recurrence(
    lambda inputs_BWE: jnp.einsum("bwe,w->be", inputs_BWE, jnp.array([0.25, -0.5, 1.0])),
    lambda states, x: (
        (new := 0.5 * states + x[:, None] * jnp.array([1.0, 2.0])[:, None]),
        new.reshape(-1, 6),
    ),
    STATE,
)


STATELESS = SUM._replace(update=None, state=StateSpec(None, input_width=3, lookback=2))


def sum_all(inputs: np.ndarray, recurrence: Recurrence) -> np.ndarray:
    """Returns what `SUM` or `STATELESS` gives after each token of a whole sequence, by its
    definition.
    """
    padded, state, results = np.pad(inputs, ((2, 0), (0, 0))), np.zeros((2, 3)), []
    for index in range(len(inputs)):
        x = 0.25 * padded[index] - 0.5 * padded[index + 1] + padded[index + 2]
        if recurrence is STATELESS:
            results.append(x)
            continue
        state = 0.5 * state + np.stack([x, 2 * x])
        results.append(state.reshape(-1))
    return np.array(results)


@pytest.mark.parametrize(
    ("recurrence_", "by_row"),
    [(SUM, True), (SUM, False), (STATELESS, True)],
    ids=["row by row", "all at once", "without a state"],
)
def test_steps_over_pages_are_the_recurrence(recurrence_, by_row):
    """Three sequences run in steps of 1 to 6 tokens each, some of which are rejected and come once
    more; as on CPUs and as on GPUs.
    """
    size, num_tokens, max_length, rng = 4, 16, 48, np.random.default_rng(2)
    sequences = rng.standard_normal((3, max_length, 3)).astype(np.float32)
    expected = [sum_all(inputs, recurrence_) for inputs in sequences]
    table_BM = 1 + rng.permutation(3 * 12).reshape(3, 12)
    states = (jnp.full((37, 2, 3), jnp.nan), jnp.zeros(37, jnp.int32))
    states = (None, None) if recurrence_ is STATELESS else states
    pages = StatePages(jnp.full((37, size, 3), jnp.nan), *states)

    @jax.jit
    def step(
        x_TE: Any,
        slots_T: Any,
        positions_T: Any,
        context_len_B: Any,
        query_start: Any,
        table_BM: Any,
        pages: Any,
    ) -> Any:
        used = {
            "positions_T": positions_T,
            "slots_ZT": slots_T[None],
            "context_len_B": context_len_B,
            "query_start": query_start,
        }
        unused = dict.fromkeys(FIELDS)
        inputs = unflatten({**unused, **used, "block_table_ZBM": table_BM[None]})
        recur = recurrence.make_recur(inputs, layer_groups=(0,), by_row=by_row)
        return recur(0, x_TE, recurrence_, pages)

    computed = [0, 0, 0]
    while min(computed) < max_length:
        rows = [index for index in rng.permutation(3) if computed[index] < max_length]
        counts = [
            min(int(rng.integers(1, 8 - len(rows))), max_length - computed[index]) for index in rows
        ]
        right = [int(rng.integers(1, count + 1)) for count in counts]
        x_TE = np.full((num_tokens, 3), np.nan, np.float32)
        slots_T, positions_T = np.zeros((2, num_tokens), np.int32)
        start = 0
        for index, count, num_right in zip(rows, counts, right, strict=True):
            at = np.arange(computed[index], computed[index] + count)
            x_TE[start : start + count] = sequences[index][at]
            x_TE[start + num_right : start + count] = 7.0
            slots_T[start : start + count] = table_BM[index][at // size] * size + at % size
            positions_T[start : start + count] = at
            start += count
        padding = 3 - len(rows)
        starts = np.cumsum([0, *counts, *[0] * padding])
        lengths = [computed[index] + count for index, count in zip(rows, counts, strict=True)]
        tables = np.concatenate([table_BM[rows], np.zeros((padding, 12), np.int64)])
        lengths += [0] * padding
        out_TO, pages = step(x_TE, slots_T, positions_T, np.array(lengths), starts, tables, pages)
        for row, index in enumerate(rows):
            at = slice(computed[index], computed[index] + right[row])
            np.testing.assert_allclose(
                out_TO[starts[row] :][: right[row]], expected[index][at], atol=1e-5
            )
            computed[index] += right[row]


# A planted mistake, and the engine that shows it.
MISTAKES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "what was rejected stays": (
        "drafting",
        lambda patch: patch.setattr(recurrence, "_begin", lambda rows, pages: rows.first_B),
    ),
    "forks without states": (
        "recomputing",
        lambda patch: patch.setattr(steps, "copy_blocks", _without_states(steps.copy_blocks)),
    ),
    "swaps without states": (
        "swapping",
        lambda patch: patch.setattr(
            executables, "scatter_blocks", _without_states(executables.scatter_blocks)
        ),
    ),
    "a window too short": (
        "recomputing",
        lambda patch: patch.setattr(cache_groups, "state_window", lambda state, block_size: 1),
    ),
}


@pytest.mark.parametrize("mistake", few(MISTAKES, ["what was rejected stays"]))
def test_a_planted_mistake_is_seen(mistake, model, lone_texts, monkeypatch):
    if "lfm2" in model.name and "window" not in mistake:
        pytest.skip("it has no states")
    name, plant = MISTAKES[mistake]
    plant(monkeypatch)
    with make_llm(model, largest_shapes=True, **ENGINES[name]) as llm:
        assert texts(llm) != lone_texts


def test_gives_way_at_every_step(engines, lone_texts):
    """It is swapped in the middle of a block, at its end, and after it."""
    llm = engines("swapping")
    engine = llm._engine
    for step in (2, 3, 5, 6, 7, 9, 14):
        engine.add("older", engine.prepare(None, PROMPTS[1], REQUESTS[0]))
        reporter = engine.add("watched", engine.prepare(None, PROMPTS[0], REQUESTS[0]))
        run_giving_way(engine, step)
        assert bits(reporter.whole().outputs) == lone_texts[0]
    invariants(llm)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised pages": ({"kv_cache_dtype": "int8"}, "kv_cache_dtype 'int8' .* recurrent layers"),
    "trees": (
        {"speculative_config": {"method": "lookahead"}},
        "'lookahead' is not supported .* states",
    ),
    "prefixes as files": (
        {"prefix_cache_directory": "."},
        "prefix_cache_directory is not supported for [23] cache groups",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(case, model):
    settings, text = REFUSED[case]
    with pytest.raises(UnsupportedError, match=text):
        make_llm(model, **settings)


def test_key_heads_that_shards_cannot_share_are_refused(qwen):
    with pytest.raises(
        ConfigError, match="2 key heads of linear attention cannot be divided into 4 equal parts"
    ):
        make_llm(qwen, tensor_parallel_reduction="invariant")


@pytest.mark.parametrize(
    ("name", "part"), [("granite_4", "mamba"), ("lfm2", "conv"), ("jamba", "mamba")]
)
def test_layers_that_are_not_divided_are_refused_by_name(name, part, tmp_path):
    directory = random_checkpoint(tmp_path, MODELS[name])
    text = (
        rf"tensor_parallel_size: model.layers.0.{part}.in_proj.weight is of a layer that .* not "
        r"divide"
    )
    with pytest.raises(UnsupportedError, match=text):
        make_llm(directory, tensor_parallel_reduction="invariant")


def test_a_checkpoint_that_asks_for_quantised_pages_gets_others_and_says_so(tmp_path, caplog):
    group = {
        "targets": ["re:none"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    }
    requested = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    requested["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    random_checkpoint(tmp_path, QWEN3_5)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_5, "quantization_config": requested}))
    make_llm(tmp_path).shutdown()
    assert (
        "a KV cache in fp8, which a model with recurrent layers cannot have: it stays in float32"
        in caplog.text
    )


def test_a_draft_model_with_states_is_refused(model):
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError, match="a draft model with recurrent layers"):
        make_llm(model, speculative_config=drafts)


def test_the_plan_counts_states(qwen, capsys):
    """By hand, a block of 4 has 2 heads of keys and values for each layer that attends; for each
    other one 4 inputs and a state.
    """
    plan = plan_of(
        capsys, str(qwen), "--block-size", "4", "--num-blocks", "81", "--max-num-seqs", "1"
    )
    attention = 4 * 2 * 2 * 16 * 4
    inputs, state = 4 * (2 * 2 * 16 + 4 * 16 + 2 * 4) * 4, 4 * 16 * 16 * 4 + 4
    assert plan["block_bytes"] == attention + 2 * (inputs + state)
    assert plan["windows"][0][1] == 2 * (inputs + state)


def test_a_pool_that_states_keep_small_says_so(qwen, capsys, caplog):
    words = (
        "--block-size",
        "4",
        "--memory",
        "2252KiB",
        "--gpu-memory-utilization",
        "1",
        "--max-num-seqs",
        "2",
    )
    for chunk, said in (("128", 1), ("16", 0)):
        caplog.clear()
        plan_of(capsys, str(qwen), *words, "--max-num-batched-tokens", chunk)
        assert caplog.text.count("a larger block_size, leaves room for more") == said
