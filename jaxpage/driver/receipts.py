"""Makes the receipts of the answers of a driver's engine."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpage.assembly import Built, describe_engine, hash_model
from jaxpage.driver.driver import Driver
from jaxpage.driver.handle import Handle
from jaxpage.engine import Engine, PreparedRequest
from jaxpage.errors import UnsupportedError
from jaxpage.receipts import (
    EngineFacts,
    Generate,
    Verification,
    WeightFacts,
    check_receiptable,
    make_receipt,
    parse_receipt,
    verify,
)
from jaxpage.settings.sampling_params import SamplingParams


class Receipts:
    """Makes the receipts of answers; any thread but the driver's may call it.

    The weights are hashed when the first receipt of their version is made.
    """

    def __init__(self, driver: Driver, built: Built, *, progress: bool = False) -> None:
        """Hashes nothing yet.

        Args:
            driver: The driver.
            built: Its engine, with what is known of its model.
            progress: True shows a bar while large weights are hashed.
        """
        self._driver = driver
        self._built = built
        self._progress = progress
        self._lock = threading.Lock()
        self._hashed: tuple[int, WeightFacts] | None = None

    @functools.cached_property
    def facts(self) -> EngineFacts:
        """Returns what the bits of the engine depend on, besides its weights.

        Raises:
            UnsupportedError: The engine's answers have no receipts.
        """
        return describe_engine(self._built.model, self._built.spec, self._built.tokenizer)

    def hash_weights(self) -> tuple[int, WeightFacts]:
        """Returns the version of the weights that are in use now, and their hashes.

        Raises:
            UnsupportedError: The weights cannot be hashed.
            RuntimeError: The model sleeps.
        """
        with self._lock:
            if self._hashed is None or self._hashed[0] != self._built.engine.weights_version:
                version, parameters = self._driver.wait(self._driver.call(_lend))
                built = self._built
                about = built.model, built.spec, built.engine.packed, parameters
                self._hashed = version, hash_model(*about, progress=self._progress)
            return self._hashed

    def check(self, requests: Sequence[PreparedRequest]) -> None:
        """Checks that the answers to requests can have receipts, and hashes the weights.

        Raises:
            UnsupportedError: They can have none; the message says why.
        """
        for request in requests:
            check_receiptable(
                request.params,
                has_adapter=request.lora is not None,
                has_vectors=request.embedded is not None,
            )
        _ = self.facts
        self.hash_weights()

    def verify(self, receipt: Mapping[str, Any], generate: Generate) -> Verification:
        """Computes the answer of a receipt again; see `LLM.verify`.

        Args:
            receipt: The receipt.
            generate: Generates with the driver's engine.

        Raises:
            ReceiptError: It is no receipt, or has a version that is not known.
            UnsupportedError: The answers of this engine have no receipts.
        """
        parsed = parse_receipt(receipt)
        _, weights = self.hash_weights()
        return verify(parsed, self.facts, weights, self._built.max_model_len, generate)

    def make(
        self, handle: Handle, model: str, *, names_tensors: bool = True
    ) -> dict[str, Any] | None:
        """Returns the receipt of an answer that has ended; None if it was cut short.

        Args:
            handle: The request, which asks for log probabilities.
            model: The name of the model.
            names_tensors: False leaves out the hashes of the single tensors.

        Raises:
            UnsupportedError: The weights were replaced since the request was added.
        """
        assert handle.reporter is not None, "the engine had the request"
        request, output = handle.reporter.answer()
        version, weights = self.hash_weights()
        if version != handle.weights_version:
            raise UnsupportedError(
                f"receipt: the request began with version {handle.weights_version} of the weights, "
                f"which were replaced by version {version} before its receipt was made"
            )
        if not names_tensors:
            weights = weights.model_copy(update={"tensors": None})
        return make_receipt(model, self.facts, weights, request, output)


def _lend(engine: Engine) -> tuple[int, Any]:
    return engine.weights_version, engine.lend_weights()


def with_logprobs(each: Sequence[Any]) -> list[Any]:
    """Returns parameters that ask for the log probability of each token, as receipts need it.

    Prompts that share their parameters share them afterwards, too.
    """
    changed = {
        id(params): replace(params, logprobs=0)
        for params in each
        if isinstance(params, SamplingParams) and params.logprobs is None
    }
    return [changed.get(id(params), params) for params in each]
