"""jaxpage as Tunix's rollout engine, made as Tunix makes one; needs google-tunix, which `.ci/nightly` installs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import LLM
from tests.support.engines import BLOCKS_OF_16

base_rollout = pytest.importorskip(
    "tunix.rl.rollout.base_rollout", reason="google-tunix is not installed"
)

from examples.tunix_rollout import JaxpageRollout  # noqa: E402

DEMO = Path(os.fspath(__file__)).parents[1] / "jaxpage" / "demo"
PROMPTS = ["Once upon a time", "The old house", "Once upon a time"]


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("demo", use_tqdm=False, **{**BLOCKS_OF_16, "max_model_len": 64}) as made:
        yield made


@pytest.fixture
def rollout(llm: LLM) -> Any:
    engine = functools.partial(JaxpageRollout, llm=llm, named=lambda tree: tree)
    assert issubclass(engine.func, base_rollout.BaseRollout), "what RLCluster asks for"
    return engine(
        rollout_actor="actor",
        tokenizer=None,
        mesh=None,
        rollout_config=base_rollout.RolloutConfig(),
    )


def config(**changes: Any) -> Any:
    values = {
        "max_tokens_to_generate": 12,
        "max_prompt_length": 8,
        "temperature": 1.0,
        "return_logprobs": True,
    }
    return base_rollout.RolloutConfig(**{**values, "seed": jax.random.key(3), **changes})


def test_log_probabilities_of_rollouts_are_found_again_to_the_last_bit(rollout: Any) -> None:
    output = rollout.generate(PROMPTS, config())
    again = rollout.generate(PROMPTS, config(seed=jax.random.PRNGKey(3)))
    assert output.text == again.text and output.text[0] != output.text[2], (
        "equal prompts, other samples"
    )
    completions = np.full((3, 12), rollout.pad_id())
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    logps = rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions)
    for row, tokens, logprobs in zip(logps, output.tokens, output.logprobs, strict=True):
        np.testing.assert_array_equal(row[: len(tokens)], logprobs)
        assert not row[len(tokens) :].any()
    assert output.left_padded_prompt_tokens.shape == (3, 8)
    assert rollout.model() == "actor"


def test_other_weights_give_other_texts_and_what_is_wrong_leaves_the_old_ones(
    rollout: Any, llm: LLM
) -> None:
    before, weights = rollout.generate(PROMPTS, config(temperature=0.0)).text, llm.parameters()
    with pytest.raises(Exception, match="lm_head|embed_tokens|is missing"):
        rollout.update_params({})
    assert rollout.generate(PROMPTS, config(temperature=0.0)).text == before
    rollout.update_params({name: -array for name, array in weights.items()})
    assert rollout.generate(PROMPTS, config(temperature=0.0)).text != before
    rollout.update_params(weights)
    assert rollout.generate(PROMPTS, config(temperature=0.0)).text == before


def test_prompts_that_are_too_long_and_unknown_arguments_are_refused(rollout: Any) -> None:
    with pytest.raises(ValueError, match="max_prompt_length is 2"):
        rollout.generate(PROMPTS, config(max_prompt_length=2))
    with pytest.raises(TypeError, match="trace_tags"):
        rollout.generate(PROMPTS, config(), trace_tags={})


def test_a_completion_ends_with_its_first_end_of_sequence_token(rollout: Any) -> None:
    eos = rollout.eos_id()
    logps = rollout.get_per_token_logps([[eos, eos, 5, 6]], [[7, eos, eos, eos]])
    assert logps[0, :2].all() and not logps[0, 2:].any()
