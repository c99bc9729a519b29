"""`LLM.score` and `LLM.embed`: against transformers, and against what generation reports."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from tests.support.engines import BLOCKS_OF_4, SMALL_POOL, make_llm

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from tests.support.hf_models import save_model  # noqa: E402
from tests.support.sweeps import few  # noqa: E402

pytestmark = pytest.mark.usefixtures("largest_shapes")

LENGTHS = (3, 41, 100, 7)


@pytest.fixture(
    scope="module", params=few(["qwen2-layer-types", "qwen3-5-mixed"], ["qwen2-layer-types"])
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_model(request.param, directory)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Any]) -> Any:
    with make_llm(model[0], max_model_len=128) as made:
        yield made


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 131, length).tolist() for length in LENGTHS]


def test_scores_are_those_of_transformers(model: tuple[Path, Any], llm: LLM) -> None:
    # the third is as long as there is room
    continuations = [[5, 6, 7], [1], [130, 0, 4, 4] * 7, [77] * 10]
    scores = llm.score(prompts(), continuations)
    for prompt, continuation, score in zip(prompts(), continuations, scores, strict=True):
        with torch.no_grad():
            logprobs = (
                model[1](torch.tensor([prompt + continuation])).logits[0].double().log_softmax(-1)
            )
        expected = [float(logprobs[len(prompt) + i - 1, id_]) for i, id_ in enumerate(continuation)]
        np.testing.assert_allclose(score, expected, atol=1e-4)
    alone = prompts()[0], [5, 6, 7]
    for made in (list, np.array, jnp.array):
        assert llm.score(*map(made, alone)) == scores[0]
        assert (
            llm.score(*(made([each]) for each in alone))
            == llm.score(*([made(each)] for each in alone))
            == scores[:1]
        )


def test_scores_are_what_generation_reports_to_the_last_bit(
    model: tuple[Path, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows a cached prefix, or runs in an engine with another pool, other chunks and other
    blocks, where each is preempted.
    """
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=20, ignore_eos=True, logprobs=0)
    llm.reset_prefix_cache()
    for is_cached in (False, True):
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        assert any(output.metrics.num_cached_tokens for output in outputs) == is_cached
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        reported = [
            [
                entry[id_].logprob
                for entry, id_ in zip(output.outputs[0].logprobs or [], text, strict=True)
            ]
            for output, text in zip(outputs, texts, strict=True)
        ]
        assert llm.score(prompts(), texts) == reported
    with make_llm(
        model[0], **{**BLOCKS_OF_4, **SMALL_POOL, "num_blocks": 65, "max_model_len": 128}
    ) as other:
        engine, step, numbers = other._engine, other._engine.step, itertools.count(1)

        def preempting() -> Any:
            if next(numbers) % 3 == 0:
                engine.scheduler.preempt_all()
            return step()

        monkeypatch.setattr(engine, "step", preempting)
        assert other.score(prompts(), texts) == reported
        assert other.stats()["num_preemptions_total"]["recompute"] >= 3


def test_embeddings_are_hidden_states_of_transformers(model: tuple[Path, Any], llm: LLM) -> None:
    for pooling in ("last", "mean"):
        vectors = llm.embed(prompts(), pooling=pooling, normalize=False, use_tqdm=False)  # type: ignore[arg-type]
        unit = llm.embed(prompts(), pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
        for prompt, vector, each in zip(prompts(), vectors, unit, strict=True):
            with torch.no_grad():
                hidden = model[1].model(torch.tensor([prompt])).last_hidden_state[0].double()
            expected = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
            np.testing.assert_allclose(vector, expected, atol=1e-4)
            np.testing.assert_allclose(each, expected / np.linalg.norm(expected), atol=1e-4)
    assert llm.embed([prompts()[2]], normalize=False, use_tqdm=False).shape == (1, 48)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1, 2], []), "at least one token each"),
        (([[1], [2]], [[3]]), "2 prompts and 1 continuations"),
        (([1], [999]), "999"),
        (([1] * 128, [2]), "^129 tokens are more than max_model_len = 128$"),
    ],
)
def test_scores_that_cannot_be_had(arguments: Any, text: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=text):
        llm.score(*arguments)


def test_a_pooling_that_is_unknown(llm: LLM) -> None:
    with pytest.raises(ValueError, match="pooling must be one of last, mean, cls, not 'max'"):
        llm.embed([1, 2], pooling="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="embed needs at least one prompt"):
        llm.embed([])


@pytest.mark.parametrize("texts", [("a", "b"), ("a", [1]), (["a"], [[1]]), ([1], ["b"])])
def test_scores_of_texts_are_refused(llm: LLM, texts: Any) -> None:
    with pytest.raises(TypeError, match="score takes token ids, and no texts"):
        llm.score(*texts)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (([[1]], [1]), "must both be lists of token ids, or both be lists of such lists"),
        (([1], [[1]]), "must both be lists of token ids, or both be lists of such lists"),
        (
            (None, None),
            "prompt_token_ids must be a list of token ids, or a list of such lists; got None",
        ),
        (
            ([1], 2),
            "continuation_token_ids must be a list of token ids, or a list of such lists; got 2",
        ),
    ],
)
def test_what_is_no_list_of_token_ids_is_not_scored(llm: LLM, prompt: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        llm.score(*prompt)
