"""Gives a trainer the forward pass of generation, as a differentiable function: `TrainableModel`.

The layers, the parameters and their names are those of the engine, and values have its bits:
docs/guides/reinforcement-learning.md says of which engines. Derivatives are those of a dense pass
over whole rows.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpage.checkpoints import ModelFiles, insert, list_names, load_weights
from jaxpage.checkpoints.in_memory import LoRAWeights as LoRAWeights
from jaxpage.checkpoints.in_memory import (
    ModelConfig,
    layers_of_weights,
    name_parameters,
    open_parameters,
    read_lora_weights,
)
from jaxpage.device.hardware import choose_backend
from jaxpage.device.rows import RowModel
from jaxpage.errors import UnsupportedError
from jaxpage.models import EncoderConfig, make_model
from jaxpage.models.parameters import LoRASpec, lora_targets
from jaxpage.models.sharding import entry_at

if TYPE_CHECKING:
    from jaxpage.llm import LLM

logger = logging.getLogger(__name__)

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
    _lora: LoRASpec
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
        max_lora_rank: int = 16,
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
            max_lora_rank: The largest rank of an adapter; the engine's, for the same bits.

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
        backend = choose_backend(attention_backend, jax.devices()[0])
        model = make_model(files.family, files.spec, dtype, None)
        rows = RowModel(model, files.spec.kv, backend, dtype, exact=exact)
        lora = LoRASpec(1, max_lora_rank, lora_targets(files.family, files.spec))
        weights = load_weights(files.plan, dtype, jnp.asarray)
        return cls(files, rows, lora, dtype), weights

    @classmethod
    def for_engine(cls, llm: LLM, *, exact: bool = True) -> tuple[Self, Parameters]:
        """Returns the model of an engine with the settings that decide bits, and its parameters.

        If the engine has settings that a trainer has not, one line of the log names them; see
        `find_differences`.

        Args:
            llm: The engine.
            exact: See `load`.

        Raises:
            UnsupportedError: The weights are quantised, or the model is an encoder.
        """
        config = llm.config
        model, parameters = cls.load(
            llm.hf_config,
            llm.parameters(),
            dtype=llm.spec.layout.dtype,
            attention_backend=config.attention_backend,
            exact=exact,
            max_lora_rank=config.max_lora_rank,
        )
        if differences := model.find_differences(llm):
            logger.warning("values differ from the engine's in bits: %s", "; ".join(differences))
        return model, parameters

    def find_differences(self, llm: LLM) -> list[str]:
        """Returns the reasons for which an engine's values may have other bits; none if empty.

        Settings and the model are compared, and no weights.
        """
        theirs = llm.spec
        kernels = theirs.described.kernels
        assert kernels is not None, "the engine runs"
        rows = self._rows
        sides = {
            "dtype": (self.dtype, theirs.layout.dtype),
            "kv_cache_dtype": (self.dtype, str(theirs.page_dtype)),
            "attention_backend": (rows.backend.name, kernels.name),
            "batch_invariant": (rows.backend.batch_invariant, kernels.batch_invariant),
            "products in C++": (rows.backend.in_cpp, kernels.in_cpp),
            "quantization": ("none", theirs.quantization or "none"),
            "shards whose sums are added": (1, theirs.sharding.num_shards),
            "exact": (rows.exact, True),
        }
        if llm.config.enable_lora:
            sides["max_lora_rank"] = (self._lora.rank, llm.config.max_lora_rank)
        differences = [
            f"{name} is {ours} here and {other} in the engine"
            for name, (ours, other) in sides.items()
            if ours != other
        ]
        if self._files.spec != theirs.described.model:
            differences.append("config.json describes another model")
        return differences

    def named(self, parameters: Parameters) -> dict[str, jax.Array]:
        """Returns the parameters by Hugging Face's names, for `LLM.update_parameters`."""
        return name_parameters(self._files.plan, parameters)

    def make_adapter(
        self,
        *,
        rank: int = 8,
        alpha: float = 16,
        target_modules: Sequence[str] | str = "all-linear",
        seed: int = 0,
    ) -> LoRAWeights:
        """Returns a new LoRA adapter, which changes nothing yet, as peft begins it.

        A is uniform between -1 / sqrt(in) and 1 / sqrt(in), B zero; both are float32. What it adds
        to a product is multiplied by alpha / rank.

        Args:
            rank: The rows of A and columns of B, from 1 to `max_lora_rank`.
            alpha: The number `lora_alpha` of peft.
            target_modules: Names of modules, or what they end with after a dot; "all-linear" for
                all that take adapters.
            seed: The seed of A.

        Raises:
            TypeError: An argument is of another type.
            ValueError: The rank is out of range, alpha is not finite, or no module has a name.
            UnsupportedError: A name is that of modules that take no adapter: experts, embeddings,
                the head, or a layer that several others share.
        """
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank must be an integer, got {rank!r:.80}")
        if not 1 <= rank <= self._lora.rank:
            raise ValueError(
                f"rank must be from 1 to max_lora_rank, which is {self._lora.rank}; got {rank}"
            )
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TypeError(f"alpha must be a number, got {alpha!r:.80}")
        if not math.isfinite(alpha):
            raise ValueError(f"alpha must be finite, got {alpha}")
        tensors = {}
        modules = self._choose_modules(target_modules)
        keys = jax.random.split(jax.random.key(seed), len(modules))
        for module, key in zip(modules, keys, strict=True):
            target = self._lora.targets[module]
            # peft draws A with torch's kaiming_uniform_(a=sqrt(5)), whose bound is this one.
            bound = target.num_in**-0.5
            name = f"base_model.model.{module}"
            shape = (rank, target.num_in)
            tensors[f"{name}.lora_A.weight"] = jax.random.uniform(
                key, shape, minval=-bound, maxval=bound
            )
            tensors[f"{name}.lora_B.weight"] = jnp.zeros((target.num_rows, rank))
        of_caller = modules if target_modules == "all-linear" else list(target_modules)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": of_caller,
            "bias": "none",
            "lora_dropout": 0.0,
            "use_rslora": False,
            "inference_mode": True,
        }
        return LoRAWeights(tensors, json.dumps(config))

    def load_adapter(self, directory: str | os.PathLike[str]) -> LoRAWeights:
        """Reads a LoRA adapter in peft's layout, in the types of its files.

        Raises:
            CheckpointError: The adapter does not fit; the message lists everything.
        """
        return read_lora_weights(Path(directory), self._lora)

    def _choose_modules(self, target_modules: Sequence[str] | str) -> list[str]:
        """Returns the modules of these names, sorted; see `make_adapter`."""
        named = jax.eval_shape(self.named, self._rows.shapes)
        # Biases and the weights of norms have one axis, and take no adapter.
        names = [name.removesuffix(".weight") for name, array in named.items() if array.ndim > 1]
        takers = sorted(self._lora.targets.keys() & names)
        if target_modules == "all-linear":
            return takers
        if isinstance(target_modules, str) or not all(
            isinstance(name, str) for name in target_modules
        ):
            raise TypeError(
                "target_modules must be a list of names of modules, or 'all-linear'; got "
                f"{target_modules!r:.80}"
            )
        chosen: set[str] = set()
        for end in target_modules:
            # peft compares whole parts of a name, so that "proj" is no end of "q_proj".
            modules = {name for name in names if f".{name}".endswith(f".{end}")}
            if not modules:
                last_names = sorted({name.rpartition(".")[2] for name in takers})
                raise ValueError(
                    f"target_modules: the model has no {end!r}; what takes adapters has the names "
                    f"{list_names(last_names, 20)}"
                )
            if others := sorted(modules - set(takers)):
                raise UnsupportedError(
                    f"target_modules: {end!r} is the name of modules that take no adapter: "
                    f"{list_names(others, 2)}"
                )
            chosen |= modules
        if not chosen:
            raise ValueError("target_modules must have a name")
        return sorted(chosen)

    @functools.cached_property
    def _rows_with_adapter(self) -> RowModel:
        """Returns the rows of the model with a slot for an adapter in every linear layer."""
        files = self._files
        rows = self._rows
        model = make_model(files.family, files.spec, self.dtype, self._lora.rule(files.rule))
        return RowModel(
            model,
            files.spec.kv,
            rows.backend,
            self.dtype,
            exact=rows.exact,
            lora_slot=self._lora.num_slots,
        )

    def logits(
        self,
        parameters: Parameters,
        token_ids_RC: Int[Array, "R C"],
        adapter: LoRAWeights | None = None,
    ) -> Float[Array, "R C V"]:
        """Returns the float32 logits of rows of C tokens, each from position 0.

        They are those of the engine, to the last bit. Tokens after the end of a row (padding)
        change nothing before it. The ids are not checked while they are traced.

        Args:
            parameters: The parameters.
            token_ids_RC: The rows, of one length.
            adapter: The LoRA adapter of all tokens; None for the model without one.

        Raises:
            TypeError: The token ids are no rows of integers, a parameter has not the type that
                it was loaded in, or the adapter is no `LoRAWeights`.
            ValueError: An id is none of the model's.
            CheckpointError: The adapter does not fit; the message lists everything.
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
        # A traced array has no numbers yet, and of one that is divided over hosts this process has
        # a part.
        if not isinstance(token_ids_RC, jax.core.Tracer) and token_ids_RC.is_fully_addressable:
            ids = np.asarray(token_ids)
            vocab_size = self._files.spec.vocab_size
            if (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
                raise ValueError(
                    f"token_ids has {wrong[0]}, but the model's token ids are 0 to {vocab_size - 1}"
                )
        if adapter is None:
            return self._rows.logits(parameters, token_ids_RC)
        rows = self._rows_with_adapter
        return rows.logits(self._with_adapter(parameters, adapter), token_ids_RC)

    def _with_adapter(self, parameters: Parameters, adapter: LoRAWeights) -> Parameters:
        """Returns the parameters with those of the adapter, which are zeros where it has none."""
        layers = layers_of_weights(adapter, self._lora, self.dtype)
        # `insert` changes the dicts that it gets, and the caller's must stay as they are; arrays
        # are not copied.
        tree: Parameters = jax.tree.map(lambda array: array, parameters)
        for path in dict.fromkeys(target.path for target in self._lora.targets.values()):
            for index, name in enumerate("ab"):
                place = (*path, "lora", name)
                # The first axis is that of the adapter slots, of which there is one here.
                shape = entry_at(self._rows_with_adapter.shapes, place).shape[1:]
                matrix = layers[path][index] if path in layers else jnp.zeros(shape, self.dtype)
                insert(tree, place, matrix[None])
        return tree

    def log_probabilities(
        self,
        parameters: Parameters,
        token_ids_RC: Int[Array, "R C"],
        adapter: LoRAWeights | None = None,
    ) -> Float[Array, "R C-1"]:
        """Returns each token's log probability, from the second on, given those before it.

        They are natural logarithms at temperature 1, equal to the last bit to what `LLM.score` and
        `LLM.generate` report for the same weights, tokens and adapter. The arguments and errors are
        those of `logits`.
        """
        logits_RCV = self.logits(parameters, token_ids_RC, adapter)[:, :-1]
        return self.select_log_softmax(logits_RCV, jnp.asarray(token_ids_RC)[:, 1:])

    def select_log_softmax(
        self, logits_RCV: Float[Array, "R C V"], token_ids_RC: Int[Array, "R C"]
    ) -> Float[Array, "R C"]:
        """Returns the log probability of a token of each row of logits, with the sampler's bits."""
        logprobs_T = self._rows.log_probabilities(
            logits_RCV.reshape(-1, logits_RCV.shape[2]), token_ids_RC.reshape(-1)
        )
        return logprobs_T.reshape(token_ids_RC.shape)
