"""Gemma 4's assistants against transformers: numbers, drafts and counts; and no draft changes a
text.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning.drafters import open_drafter
from jaxpage.checkpoints import load_weights, open_model
from jaxpage.checkpoints.drafters import assistant_files, load_assistant, open_assistant
from jaxpage.device.drafters import assistant as on_device
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.context import AttentionOptions, ForwardContext
from jaxpage.models.base import abstract
from jaxpage.models.drafters.drafter import join
from jaxpage.settings.speculative_config import SpeculativeConfig
from tests.support.assistants import (
    GROUPS,
    NUM_DRAFTS,
    Pair,
    change_config,
    draft,
    generate,
    save_assistant,
    save_pair,
    states_of,
)
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.test_drafting_ahead import counts, record

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(1, 96, length).tolist() for length in (3, 9, 30)]
FORMS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "groups": GROUPS,
    "unified": {"kind": "Gemma4UnifiedAssistant", "attention_bias": True},
}
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, n=2, seed=5, logprobs=2, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pair"))


def over_keys(
    layer: int, q_TNH: Any, k_TKH: Any, v_TKH: Any, pages: Any, options: AttentionOptions, /
) -> tuple[jax.Array, Any]:
    """Computes the attention of one query over keys and values in a row.

    The query sees the last of a window.
    """
    assert k_TKH is None and v_TKH is None
    k_SNH, v_SNH = (
        jnp.repeat(array, q_TNH.shape[1] // array.shape[1], axis=1)[
            -(options.sliding_window or 0) :
        ]
        for array in pages
    )
    scores_NTS = jnp.einsum("TNH,SNH->NTS", q_TNH, k_SNH) * options.scale
    return jnp.einsum("NTS,SNH->TNH", jax.nn.softmax(scores_NTS, axis=-1), v_SNH), pages


def difference(pair: Pair, form: str, directory: Path, *, later: int = 0) -> float:
    """Returns the greatest difference of a logit or a state from transformers, over three drafts
    after each prompt.

    later: by how much the position is off.
    """
    model = save_assistant(directory, pair.target, **FORMS[form])
    target = open_model(pair.directory)
    files = open_assistant(directory, target)
    drafter = load_assistant(files, "float32", jnp.asarray)
    parameters = {
        "target": load_weights(target.plan, "float32", jnp.asarray),
        "drafter": drafter,
    }
    assert files.num_bytes("float32") == sum(array.nbytes for array in jax.tree.leaves(drafter))
    spec = files.spec
    module: Any = join(abstract(spec.make("float32"))[0], parameters)

    @jax.jit
    def compute(token_T: Any, state: Any, layers: Any, position_T: Any) -> tuple[Any, Any]:
        output = module(token_T, state, layers, ForwardContext(position_T, over_keys))
        return module.next_state(output), module.logits(output)[0]

    worst = 0.0
    for prompt in (PROMPTS[0], PROMPTS[-1]):  # shorter than the window, and longer
        state, kv = states_of(pair.target, prompt[:-1])
        state, token = state[:, -1:], prompt[-1]
        own_state = jnp.asarray(state[0].numpy())
        kinds = model.config.get_text_config().layer_types
        pages = {
            place: [array[0].numpy().transpose(1, 0, 2) for array in kv[kind]]
            for place, kind in zip(spec.places, kinds, strict=True)
        }
        layers = [pages.get(index) for index in range(spec.first_layer)]
        for _ in range(NUM_DRAFTS):
            theirs = draft(pair, model, token, state, kv, len(prompt) - 1)
            position_T = jnp.array([len(prompt) - 1 + later])
            own_state, logits = compute(jnp.array([token]), own_state, layers, position_T)
            logits = np.array(logits)
            state, expected = theirs.last_hidden_state, theirs.logits[0, 0].numpy()
            has_logit = np.isfinite(logits)
            assert has_logit.sum() == (40 if form == "groups" else 96)
            assert np.all(expected[~has_logit] < expected[has_logit].min())
            worst = max(
                worst,
                np.abs(logits - expected)[has_logit].max(),
                np.abs(np.asarray(own_state) - state[0].numpy()).max(),
            )
            token = int(expected.argmax())
    return worst


@pytest.mark.parametrize("form", few(FORMS, ["tied", "groups"]))
def test_numbers_are_those_of_transformers(pair: Pair, form: Any, tmp_path: Any) -> None:
    assert difference(pair, form, tmp_path) < 1e-4


def test_a_position_that_is_off_by_one_is_seen(pair: Pair, tmp_path: Any) -> None:
    assert difference(pair, "tied", tmp_path, later=-1) > 1e-2


# --- in the engine


def start(pair: Pair, **settings: Any) -> LLM:
    """Starts an engine whose requests preempt each other, in blocks that no draft fills evenly."""
    config = {
        "method": "draft_model",
        "model": str(pair.assistant_directory),
        "num_speculative_tokens": NUM_DRAFTS,
    }
    sizes = {"block_size": 4, "num_blocks": 26, "max_model_len": 96}
    sizes |= {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    return make_llm(pair.directory, speculative_config=config, **{**sizes, **settings})


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Any:
    with start(pair) as llm:
        yield llm


def assert_as_transformers(llm: LLM, pair: Pair) -> int:
    """Checks texts, drafts and counts of prompts one by one; returns how many drafts were
    accepted.
    """
    total = 0
    for prompt in PROMPTS:
        text, expected, accepted = generate(pair, prompt, NUM_TOKENS)
        llm.reset_prefix_cache()
        drafts = record(llm)
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == text
        room = len(prompt) + len(text) - 1  # the last token is not drafted
        drafted = [(known, draft.token_ids[: room - len(known)]) for known, draft in drafts]
        assert [each for each in drafted if each[1]] == expected
        assert counts(output) == (sum(len(tokens) for _, tokens in expected), accepted)
        total += accepted
    return total


def test_drafts_and_counts_are_those_of_assisted_generation(llm: Any, pair: Pair) -> None:
    """Contexts are shorter than the window, and longer; some drafts are right, some wrong."""
    assert assert_as_transformers(llm, pair) >= 10
    assert llm.stats()["spec_decode_wasted_slots_total"] > 10
    invariants(llm)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the first layer of the type": (
        assistant_files,
        "find_target_layers",
        lambda kv, windows: tuple(
            [window is None for window in kv.sliding_windows].index(window is None)
            for window in windows
        ),
    ),
    "without the keys of rejected drafts": (
        on_device,
        "_count_keys",
        lambda target, ends, window: jnp.maximum(ends.position_B, 1),
    ),
    "without the last key": (
        on_device,
        "_count_keys",
        lambda target, ends, window: jnp.maximum(ends.position_B - 1, 1),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_it_reads_is_seen(pair: Pair, fault: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with start(pair) as llm, pytest.raises(AssertionError):
        assert_as_transformers(llm, pair)


# an assistant keeps nothing between steps, so that preemption and chunks have nothing of it to lose
@pytest.mark.sweep
def test_no_draft_changes_a_text(llm: Any, pair: Pair) -> None:
    """Prompts take several chunks, requests are preempted, and prefixes are found."""
    prompts = [*PROMPTS, RNG.integers(1, 96, 40).tolist(), PROMPTS[2][:20]]
    with make_llm(pair.directory) as plain:
        expected = [
            [output.outputs for output in plain.generate(prompts, params, use_tqdm=False)]
            for params in (GREEDY, SAMPLED)
        ]
    llm.reset_prefix_cache()
    before = llm.stats()
    for params, texts in zip((GREEDY, SAMPLED), expected, strict=True):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs for output in outputs] == texts
    after = llm.stats()
    for name in ("num_preemptions_total", "prefix_cache_hits_total"):
        first, last = (
            sum(each.values()) if isinstance(each, dict) else each
            for each in (before[name], after[name])
        )
        assert last > first, name
    invariants(llm)


# --- what does not fit

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"backbone_hidden_size": 40}, "backbone_hidden_size is 40, but the model's is"),
    "tokens": ({"vocab_size": 48}, "vocab_size is 48, but the model's is 96"),
    "window": ({"sliding_window": 6}, "sliding_window are 6, but 7 in the model"),
    "heads": ({"num_key_value_heads": 1}, "key/value heads and their width are (1, 16)"),
    "own keys": ({"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1, and must be"),
    "inputs": ({"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input is 4"),
    "experts": ({"enable_moe_block": True}, "enable_moe_block is True, and must be False"),
    "groups": ({"use_ordered_embeddings": True}, "num_centroids, 2048, must divide"),
    "bits": ({"quantization_config": {"bits": 4}}, "quantization_config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(pair: Pair, name: Any, tmp_path: Any) -> None:
    fields, text = REFUSED[name]
    shutil.copytree(pair.assistant_directory, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **fields)
    with pytest.raises(CheckpointError) as caught:
        open_drafter(
            SpeculativeConfig(method="draft_model", model=str(tmp_path)), open_model(pair.directory)
        )
    assert text in str(caught.value)


def test_a_target_of_another_family_is_refused(pair: Pair, tmp_path: Any) -> None:
    config = SpeculativeConfig(method="draft_model", model=str(pair.assistant_directory))
    with pytest.raises(UnsupportedError, match="Gemma 4"):
        open_drafter(config, open_model(random_checkpoint(tmp_path, LLAMA)))
