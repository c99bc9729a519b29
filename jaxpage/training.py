"""Gives a trainer the forward pass of generation, as a differentiable function: `TrainableModel`.

The layers, the parameters and their names are those of the engine, and values have its bits:
docs/guides/reinforcement-learning.md says of which engines. Derivatives are those of a dense pass
over whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpage.checkpoints import ModelFiles, load_weights
from jaxpage.checkpoints.in_memory import ModelConfig, name_parameters, open_parameters
from jaxpage.device.hardware import choose_backend
from jaxpage.device.rows import RowModel
from jaxpage.errors import UnsupportedError
from jaxpage.models import EncoderConfig, make_model

# A nested dict of arrays; some of them join several arrays of the checkpoint.
Parameters = dict[Any, Any]


@dataclass(frozen=True, eq=False)
class TrainableModel:
    """Computes a model as functions of its parameters, which are a pytree.

    All functions may be jitted and differentiated.

    Attributes:
        dtype: The type of the parameters.
    """

    _files: ModelFiles
    _rows: RowModel
    dtype: str

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        parameters: Mapping[str, Any],
        *,
        dtype: str = "float32",
        attention_backend: str = "auto",
        exact: bool = True,
    ) -> tuple[Self, Parameters]:
        """Returns the model, and its parameters in `dtype`.

        Values have the bits of an engine with the same `dtype` and `attention_backend` on the same
        kind of device, if it keeps keys and values in `dtype`, too (`kv_cache_dtype` "auto").

        Args:
            config: The content of the model's config.json as a dict, or a config of transformers.
            parameters: Arrays under the names of Hugging Face, as for `LLM.from_parameters`; the
                result of `LLM.parameters()` is accepted.
            dtype: The type of the parameters.
            attention_backend: The kernels; see `EngineConfig`.
            exact: False computes values in the dense pass, too. They then differ from the engine's
                by rounding, and parameters may be divided among devices by XLA.

        Raises:
            CheckpointError: Something does not fit; the message lists everything.
            UnsupportedError: The weights are quantised, the model is an encoder, or the device
                does not run these kernels.
        """
        files = open_parameters(config, parameters)
        if files.quantization is not None:
            raise UnsupportedError(
                f"quantised weights ({files.quantization.described}) cannot be trained"
            )
        if isinstance(files.spec, EncoderConfig):
            raise UnsupportedError("encoders cannot be trained: they give vectors, not logits")
        model = make_model(files.family, files.spec, dtype, None)
        backend = choose_backend(attention_backend, jax.devices()[0])
        rows = RowModel(model, files.spec.kv, backend, dtype, exact=exact)
        return cls(files, rows, dtype), load_weights(files.plan, dtype, jnp.asarray)

    def named(self, parameters: Parameters) -> dict[str, jax.Array]:
        """Returns the parameters by Hugging Face's names, for `LLM.update_parameters`."""
        return name_parameters(self._files.plan, parameters)

    def logits(
        self, parameters: Parameters, token_ids_RC: Int[Array, "R C"]
    ) -> Float[Array, "R C V"]:
        """Returns the float32 logits of rows of C tokens, each from position 0.

        They are those of the engine, to the last bit. Tokens after the end of a row (padding)
        change nothing before it. The ids are not checked while they are traced.

        Args:
            parameters: The parameters.
            token_ids_RC: The rows, of one length.

        Raises:
            TypeError: The token ids are no rows of integers, or a parameter has not the type that
                it was loaded in.
            ValueError: An id is none of the model's.
        """
        token_ids = token_ids_RC
        token_ids_RC = jnp.asarray(token_ids_RC)
        if (
            token_ids_RC.ndim != 2
            or not token_ids_RC.size
            or not jnp.issubdtype(token_ids_RC.dtype, jnp.integer)
        ):
            form = f"shape {token_ids_RC.shape} and dtype {token_ids_RC.dtype}"
            raise TypeError(
                f"token_ids must be integers in rows [R, C], at least one of each; got {form}"
            )
        if not isinstance(token_ids_RC, jax.core.Tracer) and token_ids_RC.is_fully_addressable:
            ids = np.asarray(token_ids)
            vocab_size = self._files.spec.vocab_size
            if (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
                raise ValueError(
                    f"token_ids has {wrong[0]}, but the model's token ids are 0 to {vocab_size - 1}"
                )
        return self._rows.logits(parameters, token_ids_RC)

    def log_probabilities(
        self, parameters: Parameters, token_ids_RC: Int[Array, "R C"]
    ) -> Float[Array, "R C-1"]:
        """Returns each token's log probability, from the second on, given those before it.

        They are natural logarithms at temperature 1, equal to the last bit to what `LLM.score` and
        `LLM.generate` report for the same weights and tokens. The errors are those of `logits`.
        """
        logits_RCV = self.logits(parameters, token_ids_RC)[:, :-1]
        return self.select_log_softmax(logits_RCV, jnp.asarray(token_ids_RC)[:, 1:])

    def select_log_softmax(
        self, logits_RCV: Float[Array, "R C V"], token_ids_RC: Int[Array, "R C"]
    ) -> Float[Array, "R C"]:
        """Returns the log probability of a token of each row of logits, with the sampler's bits."""
        logprobs_T = self._rows.log_probabilities(
            logits_RCV.reshape(-1, logits_RCV.shape[2]), token_ids_RC.reshape(-1)
        )
        return logprobs_T.reshape(token_ids_RC.shape)
