"""jaxpage as the rollout engine of google-tunix (`pip install google-tunix`).

`JaxpageRollout` has the interface of published versions (`BaseRollout`, 0.1.7) and that of Tunix's
main branch for distributed training (the protocol `Sampler` of tunix/experimental/rollout).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxpage.errors import UnsupportedError
from jaxpage.llm import LLM
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.training import TrainableModel

try:
    from tunix.rl import common as tunix_common
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        f"jaxpage.integrations.tunix needs Tunix: pip install 'google-tunix>=0.1.7' ({error})"
    ) from error


@dataclass(frozen=True)
class SampleResponse:
    """One answer of `JaxpageRollout.sample`, with the fields of Tunix's `SamplingResponse`.

    Attributes:
        request_id: That of the request.
        text: The text of the completion.
        prompt_token_ids: int32 [T].
        token_ids: int32 [N], the tokens of the completion.
        logprobs: float32 [N], or None where the request did not ask for them.
        finish_reason: "stop", "length" or "abort".
        metadata: "weights_version": the version of the engine's weights at the end.
        error: None; a request that fails raises its error.
        routed_experts: None.
    """

    request_id: str
    text: str
    prompt_token_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    finish_reason: str
    metadata: dict[str, Any] = field(default_factory=dict)
    error: None = None
    routed_experts: None = None


@dataclass(frozen=True)
class LoadInfo:
    """The load of the engine, with the fields of Tunix's `LoadInfo`.

    Attributes:
        num_requests_waiting: Requests that have not begun.
        num_requests_running: Requests that have begun and not ended.
        kv_cache_usage_perc: The share of the blocks in use, from 0 to 1.
    """

    num_requests_waiting: int
    num_requests_running: int
    kv_cache_usage_perc: float
    request_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    error: None = None


class JaxpageRollout(BaseRollout):
    """Generates rollouts for Tunix with an `LLM`, which has its own devices.

    `ClusterConfig(rollout_engine=functools.partial(JaxpageRollout, llm=llm, named=named), ...)`
    makes it the engine of a cluster. Log probabilities are those of temperature 1, and those of
    `generate`, `sample` and `get_per_token_logps` are equal to the last bit.
    """

    def __init__(
        self,
        *,
        llm: LLM,
        named: Callable[[Any], Mapping[str, Any]],
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
    ):
        """Wraps an engine; the arguments after `named` are those that Tunix passes.

        Args:
            llm: The engine. It is the caller's to shut down.
            named: Returns the trainer's parameters as a dict of arrays that
                `LLM.update_parameters` takes.
            rollout_actor: Not used: the engine has its own model.
            tokenizer: Not used: the engine has its own.
            mesh: Not used: the engine has its own.
            rollout_config: Not used: `generate` is told the configuration of each call.

        Raises:
            ValueError: The engine has no tokenizer, and Tunix has prompts as text.
        """
        if llm.tokenizer is None:
            raise ValueError("Tunix has prompts as text, and the engine has no tokenizer")
        self._llm = llm
        self._named = named
        self._tokenizer: Any = llm.tokenizer

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Returns one completion of each prompt; equal prompts get different ones.

        Raises:
            ValueError: A prompt is longer than `max_prompt_length`.
            TypeError: An argument is unknown.
        """
        if kwargs:
            raise TypeError(f"arguments that are not supported: {', '.join(kwargs)}")
        width = rollout_config.max_prompt_length
        token_ids = [self._tokenizer(prompt)["input_ids"] for prompt in prompts]
        if (max_length := max(map(len, token_ids))) > width:
            raise ValueError(f"a prompt has {max_length} tokens, and max_prompt_length is {width}")
        eos_tokens = rollout_config.eos_tokens
        params = [
            SamplingParams(
                **_common_params(rollout_config),
                max_tokens=rollout_config.max_tokens_to_generate,
                stop_token_ids=list(eos_tokens or ()),
                # If the caller names the tokens that end a text, the model's own do not.
                ignore_eos=eos_tokens is not None,
                seed=_seed_of(rollout_config.seed, index),
            )
            for index in range(len(prompts))
        ]
        requests = self._llm.generate(token_ids, params, use_tqdm=False)
        outputs = [request.outputs[0] for request in requests]
        padded_RT = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, ids in zip(padded_RT, token_ids, strict=True):
            # Tunix wants prompts that are padded on the left (`left_padded_prompt_tokens`).
            row[width - len(ids) :] = ids
        logprobs = list(map(_logprobs, outputs)) if rollout_config.return_logprobs else None
        tokens = [np.array(output.token_ids, np.int32) for output in outputs]
        return RolloutOutput([output.text for output in outputs], [], tokens, padded_RT, logprobs)

    def get_per_token_logps(
        self, prompt_tokens: npt.ArrayLike, completion_tokens: npt.ArrayLike
    ) -> npt.NDArray[np.float32]:
        """Returns the log probability of each token of the completions, 0 for padding.

        A completion ends with its first end-of-sequence token, or before its padding.

        Args:
            prompt_tokens: [R, T], padded on the left.
            completion_tokens: [R, N], padded on the right.

        Returns:
            float32 [R, N].
        """
        prompts = [_without_first(row, self.pad_id()) for row in np.asarray(prompt_tokens).tolist()]
        completions_RN = np.asarray(completion_tokens)
        completions = list(map(self._completion, completions_RN.tolist()))
        logprobs_RN = np.zeros(completions_RN.shape, np.float32)
        scores: Any = self._llm.score(prompts, completions)
        for row, logprobs in zip(logprobs_RN, scores, strict=True):
            row[: len(logprobs)] = logprobs
        return logprobs_RN

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes the trainer's parameters for the requests that follow; nothing is compiled.

        Args:
            params: What `named` takes.
            filter_types: Not used: `named` chooses.

        Raises:
            CheckpointError: Something is missing or does not fit, and the old parameters stay.
        """
        with jax.transfer_guard("allow"):  # Tunix forbids transfers here, as between its own models
            self._llm.update_parameters(self._named(params))

    def pad_id(self) -> int:
        """Returns the id of padding; that of the end of a sequence where there is no other."""
        pad_id = self._tokenizer.pad_token_id
        return self.eos_id() if pad_id is None else int(pad_id)

    def eos_id(self) -> int:
        """Returns the id of the end of a sequence."""
        return int(self._tokenizer.eos_token_id)

    def model(self) -> None:
        """Returns None: Tunix would not send parameters to a model that it trains itself."""

    # The protocol `Sampler` of Tunix's main branch.

    def initialize(self) -> None:
        """Does nothing: the engine is ready."""

    async def start(self, **kwargs: Any) -> bool:
        """Does nothing: the engine is ready."""
        return True

    async def stop(self, **kwargs: Any) -> bool:
        """Accepts no more requests, and waits until all have ended."""
        return await asyncio.to_thread(self._llm.drain)

    async def pause(self, **kwargs: Any) -> bool:
        """Keeps requests, and computes none until `resume`."""
        await asyncio.to_thread(self._llm.pause)
        return True

    async def resume(self, **kwargs: Any) -> bool:
        """Goes on after `pause`."""
        await asyncio.to_thread(self._llm.resume)
        return True

    async def get_mesh(self, **kwargs: Any) -> None:
        """Returns None: the engine's devices are its own."""

    async def sample(self, sampling_requests: Any, **kwargs: Any) -> Any:
        """Returns a `SampleResponse` for a request, or a list of them for a sequence.

        Args:
            sampling_requests: One or several requests of Tunix: `request_id`, `prompt` (a text,
                token ids, or messages of a chat) and `sampling_params`. Texts, token ids and
                messages are accepted without a request around them, too.
            kwargs: `return_logprobs`, for all requests.

        Raises:
            TypeError: An argument is unknown.
            UnsupportedError: A request asks for logits or beam search.
        """
        if set(kwargs) - {"return_logprobs"}:
            raise TypeError(f"arguments that are not supported: {', '.join(kwargs)}")
        is_sequence = isinstance(sampling_requests, list | tuple)
        requests = list(sampling_requests) if is_sequence else [sampling_requests]
        prompts = [self._prompt_ids(getattr(request, "prompt", request)) for request in requests]
        params = [
            _sampling_params(getattr(request, "sampling_params", None), index, kwargs)
            for index, request in enumerate(requests)
        ]
        outputs = await asyncio.to_thread(self._llm.generate, prompts, params, use_tqdm=False)
        ids = [str(getattr(request, "request_id", "")) for request in requests]
        responses = list(map(_response, ids, outputs, params))
        return responses if is_sequence else responses[0]

    async def bind_weight_sync(self, **kwargs: Any) -> None:
        """Does nothing: parameters are handed over in this process."""

    async def get_weight_sync_metadata(self, **kwargs: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the parameters, by the names of Hugging Face."""
        parameters = await asyncio.to_thread(self._llm.parameters)
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in parameters.items()
        }

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> bool:
        """Pauses the engine, so that no token is drawn until `post_weight_sync`."""
        return await self.pause()

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> bool:
        """Takes new parameters; running requests keep their keys and values.

        Args:
            sync_request: The trainer's parameters, as for `update_params`, or an object that has
                them as its attribute `weights`.
            kwargs: `mode`, of `LLM.update_parameters`; "keep" where it is not there.

        Raises:
            ValueError: There are no parameters. The other errors are those of
                `LLM.update_parameters`.
        """
        parameters = getattr(sync_request, "weights", sync_request)
        if parameters is None:
            raise ValueError("weight_sync needs the parameters: weight_sync(parameters)")
        mode = kwargs.get("mode", "keep")
        named = self._named(parameters)
        await asyncio.to_thread(self._llm.update_parameters, named, mode=mode)
        return True

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> bool:
        """Goes on with the new parameters."""
        return await self.resume()

    async def get_transfer_status(self, req_id: Any, **kwargs: Any) -> str:
        """Returns "SUCCESS": `weight_sync` ends when the parameters are in use."""
        return "SUCCESS"

    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: list[int], **kwargs: Any
    ) -> bool:
        """Refuses to move keys and values between engines.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("keys and values do not move between engines")

    async def get_load_info(self, **kwargs: Any) -> LoadInfo:
        """Returns the load of the engine."""
        stats = await asyncio.to_thread(self._llm.stats)
        return LoadInfo(
            int(stats["num_requests_waiting"]),
            int(stats["num_requests_running"]),
            float(stats["kv_cache_usage_perc"]),
        )

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
            prompt = self._tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=False
            )
        return [int(id_) for id_ in np.asarray(prompt).reshape(-1)]

    def _completion(self, token_ids: list[int]) -> list[int]:
        if self.eos_id() in token_ids:
            return token_ids[: token_ids.index(self.eos_id()) + 1]
        return _without_first(token_ids[::-1], self.pad_id())[::-1]


def _common_params(config: Any) -> dict[str, Any]:
    """Returns the parameters that both interfaces of Tunix call by the same names."""
    return {
        "temperature": config.temperature,
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "top_k": 0 if config.top_k in (None, -1) else config.top_k,
        "logprobs": 0 if config.return_logprobs else None,
    }


def _sampling_params(requested: Any, index: int, kwargs: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters of a request of `sample`, the `index`-th of its call."""
    if requested is None:
        return SamplingParams(max_tokens=64, logprobs=0 if kwargs.get("return_logprobs") else None)
    if requested.return_logits or requested.beam_size is not None:
        raise UnsupportedError("return_logits and beam_size are not supported")
    common = _common_params(requested)
    if kwargs.get("return_logprobs"):
        common["logprobs"] = 0
    return SamplingParams(
        **common, max_tokens=requested.max_tokens, seed=_seed_of(requested.seed, index)
    )


def _seed_of(seed: Any, index: int) -> int | None:
    """Returns the seed of a prompt of a call whose seed is a number, a key of JAX, or None."""
    if seed is None:
        return None
    if isinstance(seed, jax.Array):
        data = jax.random.key_data(seed)
        # A key of JAX is two words, and `jax.random.key(n)` has n in the last one.
        seed = np.asarray(data).ravel()[-1]
    return (int(seed) + index) % 2**32


def _logprobs(output: CompletionOutput) -> npt.NDArray[np.float32]:
    entries = zip(output.logprobs or (), output.token_ids, strict=True)
    return np.array([entry[id_].logprob for entry, id_ in entries if entry], np.float32)


def _response(request_id: str, request: RequestOutput, params: SamplingParams) -> SampleResponse:
    output = request.outputs[0]
    return SampleResponse(
        request_id,
        output.text,
        np.array(request.prompt_token_ids, np.int32),
        np.array(output.token_ids, np.int32),
        None if params.logprobs is None else _logprobs(output),
        str(output.finish_reason),
        {"weights_version": request.weights_version},
    )


def _without_first(token_ids: Sequence[int], pad_id: int) -> list[int]:
    """Returns the tokens after the padding at the beginning."""
    start = next((index for index, id_ in enumerate(token_ids) if id_ != pad_id), len(token_ids))
    return list(token_ids[start:])


class TrainedModule(nnx.Module):
    """A `TrainableModel` as the module that Tunix trains.

    `nnx.state(module)` has the parameters; `named(state)` is what `LLM.update_parameters` takes.
    Its logits have the bits of the engine, and so have Tunix's log probabilities after
    `use_log_softmax`.
    """

    def __init__(self, model: TrainableModel, parameters: Any):
        """Makes the parameters those of a module.

        Args:
            model: The model.
            parameters: The second result of `TrainableModel.load`.
        """
        self.model = model
        self.parameters = nnx.data(jax.tree.map(nnx.Param, parameters))

    def __call__(
        self,
        input_tokens: Int[Array, "R C"],
        positions: Int[Array, "R C"],
        cache: None = None,
        attention_mask: Bool[Array, "R C C"] | None = None,
    ) -> tuple[Float[Array, "R C V"], None]:
        """Returns the logits of rows that are padded on both sides, and None for a cache.

        Args:
            input_tokens: The rows.
            positions: The place of each token after the padding on the left, which has 0.
            cache: None.
            attention_mask: Which tokens see which; its diagonal tells padding.

        Raises:
            UnsupportedError: There is a cache, or no mask.
        """
        if cache is not None or attention_mask is None:
            raise UnsupportedError("the trained module takes an attention mask and no cache")
        # Each token sees itself, and none sees padding.
        is_token_RC = jnp.diagonal(attention_mask, axis1=1, axis2=2)
        first_R1 = jnp.argmax(is_token_RC, axis=1)[:, None]
        indices_C = jnp.arange(input_tokens.shape[1])
        length = len(indices_C)
        # Rows begin at position 0 in `TrainableModel`, so padding on the left goes to the right.
        rotated = jnp.take_along_axis(input_tokens, (indices_C + first_R1) % length, axis=1)
        logits_RCV = self.model.logits(nnx.to_pure_dict(nnx.state(self))["parameters"], rotated)
        back = (indices_C - first_R1) % length
        return jnp.take_along_axis(logits_RCV, back[..., None], axis=1), None

    def use_log_softmax(self) -> None:
        """Lets Tunix, in this process, make log probabilities of logits as the engine does."""
        tunix_common.selective_log_softmax = self.model.select_log_softmax

    def named(self, state: nnx.State) -> dict[str, jax.Array]:
        """Returns the parameters of a state by the names of Hugging Face."""
        return self.model.named(nnx.to_pure_dict(state)["parameters"])
