"""jaxpage as Tunix's rollout engine, made as Tunix makes one.

Needs google-tunix, which `.ci/nightly` installs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpage import LLM
from jaxpage.errors import UnsupportedError
from jaxpage.training import TrainableModel
from tests.support.engines import BLOCKS_OF_16

base_rollout = pytest.importorskip(
    "tunix.rl.rollout.base_rollout", reason="google-tunix is not installed"
)

from jaxpage.integrations.tunix import JaxpageRollout, TrainedModule  # noqa: E402


@runtime_checkable
class Sampler(Protocol):
    """The signatures of tunix.experimental.rollout.sampler.Sampler on 2026-08-21."""

    def initialize(self) -> None: ...
    async def start(self, **kwargs: Any) -> Any: ...
    async def stop(self, **kwargs: Any) -> Any: ...
    async def pause(self, **kwargs: Any) -> Any: ...
    async def resume(self, **kwargs: Any) -> Any: ...
    async def get_mesh(self, **kwargs: Any) -> Any: ...
    async def sample(self, sampling_requests: Any, **kwargs: Any) -> Any: ...
    async def bind_weight_sync(self, **kwargs: Any) -> Any: ...
    async def get_weight_sync_metadata(self, **kwargs: Any) -> Any: ...
    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def get_transfer_status(self, req_id: Any, **kwargs: Any) -> Any: ...
    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: list[int], **kwargs: Any
    ) -> bool: ...
    async def get_load_info(self, **kwargs: Any) -> Any: ...


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
    assert rollout.model() is None, "Tunix would think that both share parameters"


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


def test_a_trained_module_has_the_bits_of_the_rollout_whatever_the_padding(
    rollout: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = pytest.importorskip("tunix.rl.common")
    monkeypatch.setattr(common, "selective_log_softmax", common.selective_log_softmax)
    dtype = str(next(iter(llm.parameters().values())).dtype)
    model, parameters = TrainableModel.load(llm.hf_config, llm.parameters(), dtype=dtype)
    module = TrainedModule(model, parameters)
    module.use_log_softmax()
    assert module.named(nnx.state(module)).keys() == llm.parameters().keys()
    output = rollout.generate(PROMPTS, config())
    completions = np.full((3, 14), rollout.pad_id(), np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    graph, state = nnx.split(module)

    def logprobs(state: Any) -> jax.Array:
        return common.compute_per_token_logps(
            graph,
            state,
            output.left_padded_prompt_tokens,
            completions,
            rollout.pad_id(),
            rollout.eos_id(),
            stop_gradient=False,
        )

    for row, tokens, drawn in zip(logprobs(state), output.tokens, output.logprobs, strict=True):
        np.testing.assert_array_equal(row[: len(tokens)], drawn)
    gradients = jax.grad(lambda state: logprobs(state)[:, :4].sum())(state)
    assert all(np.isfinite(leaf).all() and leaf.any() for leaf in jax.tree.leaves(gradients))


def request(prompt: Any, **changes: Any) -> SimpleNamespace:
    """Returns a request with the fields and defaults of Tunix's `SamplingRequest`."""
    params = {
        "max_tokens": 6,
        "temperature": 0.0,
        "top_p": None,
        "top_k": None,
        "seed": None,
        "return_logprobs": True,
        "return_logits": False,
        "beam_size": None,
    }
    return SimpleNamespace(
        request_id=f"of {prompt}",
        prompt=prompt,
        sampling_params=SimpleNamespace(**params | changes),
    )


def test_the_rollout_is_a_sampler_of_the_main_branch(rollout: Any) -> None:
    assert isinstance(rollout, Sampler)
    for name in [name for name in vars(Sampler) if not name.startswith("_")]:
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (type(rollout), Sampler))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_samples_are_those_of_the_engine_and_go_on_with_new_weights(rollout: Any, llm: LLM) -> None:
    weights = llm.parameters()
    ids = rollout._tokenizer(PROMPTS[0])["input_ids"]

    async def live() -> None:
        first, second = await rollout.sample([request(PROMPTS[0]), request(ids)])
        assert first.request_id == f"of {PROMPTS[0]}" and first.finish_reason == "length"
        assert first.text and first.prompt_token_ids.tolist() == ids
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        scores: Any = llm.score(ids, first.token_ids.tolist())
        np.testing.assert_array_equal(first.logprobs, np.array(scores, np.float32))
        alone = await rollout.sample(request(ids, return_logprobs=False))
        assert alone.logprobs is None and alone.text == first.text
        assert (await rollout.get_weight_sync_metadata()).keys() == weights.keys()

        await rollout.pre_weight_sync()
        waiting = asyncio.create_task(rollout.sample(request(ids)))
        await rollout.weight_sync({name: -array for name, array in weights.items()})
        assert not waiting.done()
        await rollout.post_weight_sync()
        other = await waiting
        assert other.text != first.text
        assert other.metadata["weights_version"] > first.metadata["weights_version"]
        await rollout.weight_sync(SimpleNamespace(weights=weights))
        assert (await rollout.sample(request(ids))).text == first.text
        load = await rollout.get_load_info()
        assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)

    asyncio.run(live())


def test_what_a_sampler_cannot_do_is_refused(rollout: Any) -> None:
    for action, kind in [
        (rollout.sample(request("a", beam_size=2)), UnsupportedError),
        (rollout.sample(request("a", return_logits=True)), UnsupportedError),
        (rollout.sample(request("a"), trace_tags={}), TypeError),
        (rollout.weight_sync(), ValueError),
        (rollout.migrate_kv_cache("a", "b", [1]), UnsupportedError),
    ]:
        with pytest.raises(kind):
            asyncio.run(action)
