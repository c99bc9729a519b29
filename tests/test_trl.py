"""The client for TRL: what its trainers call, on a server, with the engine's tokens and bits."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.assembly import Built
from jaxpage.integrations.trl import JaxpageClient
from tests.support.engines import make_llm
from tests.support.running import serving

# The methods of `VLLMClient` in TRL of July 2026, with their arguments in order.
SAMPLING = [
    *("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens"),
    *("logprobs", "structured_outputs_regex", "generation_kwargs"),
]
METHODS = {
    "__init__": ["base_url", "host", "server_port", "group_port", "connection_timeout"],
    "check_server": ["total_timeout", "retry_interval"],
    "generate": ["prompts", "images", *SAMPLING],
    "init_communicator": ["device"],
    "update_named_param": ["name", "weights"],
    "update_model_params": ["model"],
    "reset_prefix_cache": [],
    "close_communicator": [],
}
PROMPTS = ["Once upon a time", "The cat"]


class Model:
    """A model of torch, as far as the client looks at it."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self._weights = weights

    def named_parameters(self) -> Any:
        return self._weights.items()


def test_methods_take_what_trl_gives_them():
    for name, arguments in METHODS.items():
        parameters = list(inspect.signature(getattr(JaxpageClient, name)).parameters.values())[1:]
        positional = [
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        assert positional == arguments, name
    assert {"messages"} <= inspect.signature(JaxpageClient.chat).parameters.keys()


def test_a_trainer_generates_and_updates(tmp_path: Path) -> None:
    with make_llm("demo", largest_shapes=True) as llm:
        built = Built(llm._engine, llm.tokenizer, {}, llm.spec, llm._model)
        with serving(built, weights_directory=str(tmp_path)) as running:
            client = JaxpageClient(running.address, weights_directory=tmp_path)
            sampling = {"n": 2, "temperature": 0.8, "max_tokens": 6, "logprobs": 2}
            texts = client.generate(PROMPTS, **sampling, generation_kwargs={"seed": 7})
            params = SamplingParams(n=2, temperature=0.8, max_tokens=6, logprobs=2, seed=7, top_k=0)
            check(llm, texts, params)
            again = client.generate(texts["prompt_ids"], **sampling, generation_kwargs={"seed": 7})
            assert again == texts
            client.init_communicator("cuda:0")
            weights = {name: np.asarray(array) for name, array in llm.parameters().items()}
            changed = {name: array * np.float32(1.25) for name, array in weights.items()}
            client.update_model_params(Model(changed))
            other = client.generate(PROMPTS, **sampling, generation_kwargs={"seed": 7})
            assert other["prompt_ids"] == texts["prompt_ids"] and other != texts
            check(llm, other, params)
            for name, array in weights.items():
                client.update_named_param(name, array)
            client.reset_prefix_cache()
            assert client.generate(PROMPTS, **sampling, generation_kwargs={"seed": 7}) == texts
            assert not list(tmp_path.iterdir())
            client.reset_prefix_cache()  # without weights
            plain = client.generate(PROMPTS, max_tokens=3, logprobs=None, top_k=-1)
            assert plain["logprobs"] is None and len(plain["completion_ids"]) == 2
            client.update_named_param("nothing", np.zeros(3, np.float32))
            with pytest.raises(RuntimeError, match="/v1/update_weights: 400.*nothing"):
                client.reset_prefix_cache()
            check_retries(client, weights, changed, sampling)
            with pytest.raises(RuntimeError, match="/v1/generate: 400.*temperature"):
                client.generate(PROMPTS, temperature=-1.0)
            with pytest.raises(ValueError, match="weights_directory is needed"):
                JaxpageClient(running.address).update_named_param("a", np.zeros(1))
            for path in ("/init_communicator/", "/update_named_param/", "/update_weights"):
                refused = httpx.post(running.address + path, json={})
                assert refused.status_code == 404
                assert "no weights by NCCL" in refused.json()["error"]["message"]
    with pytest.raises(ConnectionError, match="cannot be reached"):
        JaxpageClient("http://127.0.0.1:9")


def check_retries(
    client: JaxpageClient, old: dict[str, Any], new: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Checks that other weights are taken after those that the server refused.

    Those that never reached it stay for the next try.
    """

    def generate() -> Any:
        return client.generate(PROMPTS, **sampling, generation_kwargs={"seed": 7})

    before = generate()
    client.update_model_params(Model(new))
    changed = generate()
    assert changed != before
    address = client.base_url
    client.base_url = "http://127.0.0.1:9"
    with pytest.raises(OSError, match="refused"):
        client.update_model_params(Model(old))
    client.base_url = address
    assert generate() == changed
    client.reset_prefix_cache()
    assert generate() == before


def check(llm: LLM, answer: dict[str, Any], params: SamplingParams) -> None:
    """Compares an answer with what the engine gives to Python."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    assert answer["prompt_ids"] == [output.prompt_token_ids for output in outputs]
    assert answer["completion_ids"] == [sample.token_ids for sample in samples]
    for sample, logprobs, ids in zip(
        samples, answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        for entry, values, tokens in zip(sample.logprobs or [], logprobs, ids, strict=True):
            assert entry is not None
            assert {token: logprob.logprob for token, logprob in entry.items()} == dict(
                zip(tokens, values, strict=True)
            )
            assert values == sorted(values, reverse=True)
