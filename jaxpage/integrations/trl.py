"""A client of `jaxpage serve` with the methods of TRL's `VLLMClient`, for trainers on torch.

TRL's own client sends weights by NCCL to the processes of vLLM. This one writes them to a directory
that the server reads (`--weights-directory`), so it needs neither vLLM nor NCCL.
"""

from __future__ import annotations

import base64
import json
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from jaxpage.settings.engine_settings import AnyPath

_AT_ONCE = 64  # requests of one call; the server batches them


class JaxpageClient:
    """Generates on a server, and gives it the trainer's weights.

    Args:
        base_url: The address of the server; None makes it of `host` and `server_port`.
        host: The host.
        server_port: The port.
        group_port: Not used: there is no communicator.
        connection_timeout: The seconds for which `check_server` tries again.
        weights_directory: The directory of the server's `--weights-directory`, as this process sees
            it; None if weights are not sent.
        mode: What an update does to requests that run: "wait", "abort", "keep" or "recompute".
        api_key: The key of the server, if it needs one.

    Raises:
        ConnectionError: The server cannot be reached.
    """

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "0.0.0.0",
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        *,
        weights_directory: AnyPath | None = None,
        mode: str = "wait",
        api_key: str | None = None,
    ) -> None:
        self.base_url = (base_url or f"http://{host}:{server_port}").rstrip("/")
        self._directory = None if weights_directory is None else Path(weights_directory)
        self._mode = mode
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._weights: dict[str, npt.NDArray[Any]] = {}
        self.check_server(connection_timeout)
        self._model = self._ask("/v1/models")["data"][0]["id"]

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits until the server answers.

        Args:
            total_timeout: The seconds after which it gives up.
            retry_interval: The seconds between two tries.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        ends = time.monotonic() + total_timeout
        while True:
            try:
                self._ask("/health")
                return
            except (OSError, RuntimeError) as error:
                if time.monotonic() >= ends:
                    raise ConnectionError(f"{self.base_url} cannot be reached: {error}") from error
            time.sleep(retry_interval)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        images: Any = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Generates for prompts, which are texts or token ids; the arguments are TRL's.

        Args:
            prompts: The prompts.
            images: Must be empty.
            n: The completions of each prompt.
            repetition_penalty: See `SamplingParams`.
            temperature: See `SamplingParams`.
            top_p: See `SamplingParams`.
            top_k: See `SamplingParams`; 0 or -1 for no cut.
            min_p: See `SamplingParams`.
            max_tokens: The most tokens of a completion.
            logprobs: The most likely tokens whose log probabilities come with each token's own;
                None for no log probabilities at all.
            structured_outputs_regex: A regular expression for the completions.
            generation_kwargs: Further fields of /v1/generate, which replace the others.

        Returns:
            `prompt_ids` of each prompt, and of each completion `completion_ids`, `logprobs` and
            `logprob_token_ids`: for each token those of the most likely tokens and its own, the
            most likely first.

        Raises:
            ValueError: There are images.
            RuntimeError: The server refuses a request; the text is its answer.
        """
        if images and any(images):
            raise ValueError("images: a trainer's prompts with pictures are not supported")
        sampling: dict[str, Any] = {
            "n": n,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": max(top_k, 0),
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            **(
                {"structured_outputs": {"regex": structured_outputs_regex}}
                if structured_outputs_regex
                else {}
            ),
            **(generation_kwargs or {}),
        }
        return self._generate(prompts, sampling)

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Generates for conversations; see `generate`.

        Args:
            messages: The conversations, each a list of messages.
            chat_template_kwargs: Variables of the model's chat template.
            tools: Tools as JSON schemas, for the template.
            chat_template: Must be None: the server has the model's own.
            sampling: The other arguments of `generate`.

        Raises:
            ValueError: A chat template is given.
        """
        if chat_template is not None:
            raise ValueError("chat_template: the server has the model's own template")
        options = {
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
            **({"tools": list(tools)} if tools else {}),
        }
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            prompts = list(
                pool.map(lambda chat: self._tokenize({"messages": list(chat), **options}), messages)
            )
        return self.generate(prompts, **sampling)

    def init_communicator(self, device: Any = 0) -> None:
        """Does nothing: weights go through files.

        Args:
            device: Not used.
        """

    def update_named_param(self, name: str, weights: Any) -> None:
        """Keeps a weight for the next update, which `reset_prefix_cache` makes, as TRL calls it.

        Args:
            name: The name of Hugging Face.
            weights: A tensor of torch or an array of numpy.

        Raises:
            ValueError: The client has no directory for weights.
        """
        if self._directory is None:
            raise ValueError("weights_directory is needed to send weights to the server")
        if hasattr(weights, "detach"):  # numpy has no bfloat16, and float32 has all its numbers
            weights = weights.detach().cpu().float().numpy()
        # The trainer goes on changing its own array.
        self._weights[name] = np.array(weights, order="C")

    def update_model_params(self, model: Any) -> None:
        """Gives the server all weights of a model of torch.

        Args:
            model: The model, or anything with its method `named_parameters`.

        Raises:
            ValueError: The client has no directory for weights.
            RuntimeError: The server refuses them; the text is its answer.
        """
        for name, parameter in model.named_parameters():
            self.update_named_param(name, parameter)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Has the server take the weights that were kept, or else empty its prefix cache.

        Weights that do not fit the model (status 400) are not kept any longer. After other errors
        they are: the next call tries again.

        Raises:
            RuntimeError: The server refuses them; the text is its answer.
            OSError: The server cannot be reached, or the weights cannot be written.
        """
        if not self._weights:
            self._ask("/reset_prefix_cache", {})
            return
        assert self._directory is not None
        path = self._directory / f"trl-{uuid.uuid4().hex}"
        path.mkdir(parents=True)
        try:
            save_file(self._weights, path / "model.safetensors")
            self._ask("/v1/update_weights", {"path": path.name, "mode": self._mode})
        except RuntimeError as error:
            # The server would refuse these weights again; other failures may pass.
            if isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code == 400:
                self._weights = {}
            raise
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self._weights = {}

    def close_communicator(self) -> None:
        """Does nothing: there is no communicator."""

    def _generate(self, prompts: Sequence[Any], sampling: dict[str, Any]) -> dict[str, Any]:
        def answer(prompt: Any) -> tuple[list[int], list[dict[str, Any]]]:
            token_ids = self._token_ids(prompt)
            body = {"model": self._model, "prompt_token_ids": token_ids, **sampling}
            return token_ids, self._ask("/v1/generate", body)["choices"]

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(answer, prompts))
        choices = [choice for _, of_prompt in answers for choice in of_prompt]
        entries = None
        if sampling["logprobs"] is not None:
            entries = [_entries(choice) for choice in choices]
        return {
            "prompt_ids": [token_ids for token_ids, _ in answers],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": entries and [[logprobs for _, logprobs in tokens] for tokens in entries],
            "logprob_token_ids": entries and [[ids for ids, _ in tokens] for tokens in entries],
        }

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self._tokenize({"prompt": prompt}) if isinstance(prompt, str) else list(prompt)

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        tokens: list[int] = self._ask("/tokenize", body)["tokens"]
        return tokens

    def _ask(self, path: str, body: Any = None) -> Any:
        """Returns the answer to a request: GET without a body, and else POST.

        Raises:
            RuntimeError: The server refuses it.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RuntimeError(f"{path}: {error.code} {text}") from error


def _entries(choice: Mapping[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Returns, for each token, ids and log probabilities, the most likely first."""
    drawn = zip(choice["token_ids"], _array(choice["logprobs"]).tolist(), strict=True)
    if "top_token_ids" not in choice:
        return [([token_id], [logprob]) for token_id, logprob in drawn]
    top_ids = _array(choice["top_token_ids"]).tolist()
    top_logprobs = _array(choice["top_logprobs"]).tolist()
    entries = []
    for pair, ids, logprobs in zip(drawn, top_ids, top_logprobs, strict=True):
        top = zip(ids, logprobs, strict=True)
        # Where there are fewer tokens than were asked for, -1 fills the row.
        others = [other for other in top if other[0] not in (-1, pair[0])]
        ranked = sorted([pair, *others], key=lambda entry: -entry[1])
        entries.append(([token_id for token_id, _ in ranked], [logprob for _, logprob in ranked]))
    return entries


def _array(body: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Returns an array of an answer."""
    # The numbers are little-endian (docs/reference/wire-format.md).
    dtype = np.dtype(body["dtype"]).newbyteorder("<")
    return np.frombuffer(base64.b64decode(body["data"]), dtype).reshape(body["shape"])
