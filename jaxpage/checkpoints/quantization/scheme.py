"""Defines which modules of a quantised checkpoint are quantised, and in which format."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.errors import CheckpointError
from jaxpage.layers import Embedding, Linear, quantized
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.quantized_experts import QuantizedExpertLinear
from jaxpage.models.parameters import Path, Rule

# This can be used in place of any other checkpoint.
UNQUANTISED = "the unquantised checkpoint with quantization='int8' or 'int4'"
KV_SCALES = ("*.k_scale", "*.v_scale")
HEAD = "lm_head"


@runtime_checkable
class FormOf(Protocol):
    """Gives the format of a linear module; None if it is not quantised."""

    def __call__(self, *names: str) -> quantized.WeightFormat | None:
        """Returns the format of the module with these names, any of which a config may use."""


@dataclass(frozen=True)
class Check:
    """Checks tensors of a scheme that fill no parameter.

    Attributes:
        end: The end of the tensors' names.
        says: Returns what is wrong with the tensor of a module, from its name and its numbers, or
            None.
        codes: The types that the tensors can have.
    """

    end: str
    says: Callable[[str, np.ndarray], str | None]
    codes: tuple[str, ...] = ("I32",)


@dataclass(frozen=True)
class Scheme:
    """Describes the quantisation of a checkpoint.

    Attributes:
        name: The name in the setting `quantization`.
        described: The text for people.
        form_of: Gives the format of the linear module with this name in the checkpoint.
        ignored: Globs over names of tensors that say nothing that is not known already.
        kv_cache_dtype: The meaning of the setting "auto" for this checkpoint.
        checks: The checks of ignored tensors.
        head: The format of the head; None if it is not quantised.
    """

    name: str
    described: str
    form_of: FormOf
    ignored: tuple[str, ...] = ()
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    checks: tuple[Check, ...] = ()
    head: quantized.WeightFormat | None = None

    def with_head(self, codes: Set[str]) -> Scheme:
        """Returns this scheme for a checkpoint whose head is quantised if its codes are stored.

        Configs do not tell: most give the head a format by their rule for all linear layers.

        Args:
            codes: The names of the tensors that hold codes.
        """
        form = self.form_of(HEAD)
        if form is None or form.is_rounded:
            return self
        end = f".{HEAD}.{form.values.name}"
        is_stored = any(f".{name}".endswith(end) for name in codes)
        return replace(self, head=form) if is_stored else self

    def of_stored(self, codes: Set[str]) -> Scheme:
        """Returns this scheme for those modules alone whose codes are stored.

        Args:
            codes: The names of the tensors that hold codes.
        """

        def form_of(*names: str) -> quantized.WeightFormat | None:
            form = self.form_of(*names)
            if form is None or form.is_rounded:
                return form
            is_stored = any(f"{name}.{form.values.name}" in codes for name in names)
            return form if is_stored else None

        return replace(self, form_of=form_of)

    def under_names(self, others: Callable[[str], Sequence[str]]) -> Scheme:
        """Returns this scheme for modules that a config may know by other names.

        Args:
            others: Gives the other names of a module.
        """

        def form_of(*names: str) -> quantized.WeightFormat | None:
            return self.form_of(*names, *(other for name in names for other in others(name)))

        return replace(self, form_of=form_of)

    @property
    def rule(self) -> Rule:
        """Returns the rule that replaces modules by quantised ones."""
        return self._replacement

    def _replacement(self, path: Path, module: nnx.Module) -> nnx.Module | None:
        if isinstance(module, Embedding):
            form = self.head
            if form is None or not (module.is_head if form.is_rounded else module.name == HEAD):
                return None
            return quantized.QuantizedEmbedding(module, form)
        if isinstance(module, Linear):
            names = [part.name for part in module.spec.parts if part.name is not None] or [
                module.spec.fused or ""
            ]
            forms = [self.form_of(name) for name in names]
            if forms != forms[:1] * len(forms) and module.spec.multiplied:
                # For example q and k have four bits, and v is not quantised.
                return quantized.LinearOfParts(module.spec, forms)
            form = self._form(names, module.spec.num_in)
            if form is None or (form.is_rounded and not module.spec.multiplied):
                return None
            return quantized.QuantizedLinear(module.spec, form)
        if isinstance(module, ExpertLinear):
            names = [name for each in module.spec.modules for name in each] or [module.spec.name]
            form = self._form(names, module.spec.num_in)
            if form is None or not (form.is_rounded or module.spec.modules):
                return None
            return QuantizedExpertLinear(module.spec, form)
        return None

    def _form(self, names: Sequence[str], num_in: int) -> quantized.WeightFormat | None:
        """Returns the format of modules that are one product."""
        forms = {name: self.form_of(name) for name in names}
        form = forms[names[0]]
        if differing := [name for name in names if forms[name] != form]:
            named = names if len(names) < 4 else (names[0], differing[0])
            raise CheckpointError(
                f"config.json: {', '.join(named)} are one product, and must be quantised alike"
            )
        if form and form.is_rounded and num_in % (form.group_size or 1):
            raise CheckpointError(
                f"quantization: {names[0]} has {num_in} inputs, which are no multiple of "
                f"{form.group_size}, of which each group has a scale; use int8"
            )
        return form


def everywhere_but(excluded: Sequence[str], form: quantized.WeightFormat) -> FormOf:
    """Returns `Scheme.form_of` for one format of all modules but the excluded ones.

    A module is excluded if any of its names is.
    """

    @functools.cache
    def form_of(*names: str) -> quantized.WeightFormat | None:
        return None if any(matches(name, excluded) for name in names) else form

    return form_of


def check_zeros(
    form_of: FormOf,
) -> Callable[[str, np.ndarray], str | None]:
    """Returns the check of a bias that the layer does not have.

    Old AutoGPTQ wrote zeros for each quantised layer.
    """

    def check(module: str, numbers: np.ndarray) -> str | None:
        if form_of(module) is not None and not np.any(numbers):
            return None
        return "is unexpected: the layer has no bias, and these are not all zero"

    return check


def check_order(
    form_of: FormOf,
) -> Callable[[str, np.ndarray], str | None]:
    """Returns the check of the group that each input belongs to.

    The inputs of a group must follow each other.
    """

    def check(module: str, groups: np.ndarray) -> str | None:
        form = form_of(module)
        if form is None or np.array_equal(
            groups, np.arange(groups.size) // (form.group_size or max(groups.size, 1))
        ):
            return None
        return (
            f"has inputs in the order of activations, not {form.group_size or 'all'} in a row for each group, which is not supported; "
            f"use a checkpoint without it, or {UNQUANTISED}"
        )

    return check


def read_kv_cache(config: QuantizationFields) -> Literal["auto", "fp8"]:
    """Returns what `quantization_config` says of the KV cache.

    The field is ModelOpt's `kv_cache_quant_algo`, or `kv_cache_scheme`. The scales of the
    checkpoint, one for a layer (`KV_SCALES`), are not read: pages have a scale for each token and
    head.
    """
    algorithm = config.config.get("kv_cache_quant_algo")
    scheme = config.config.get("kv_cache_scheme")
    if not algorithm and not scheme:
        return "auto"
    is_fp8 = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (
        8,
        "float",
    )
    only = "is not supported, only FP8; without it the setting kv_cache_dtype decides alone"
    if algorithm and algorithm != "FP8":
        config.refuse("kv_cache_quant_algo", only)
    if scheme and not is_fp8:
        config.refuse("kv_cache_scheme", only)
    return "fp8"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a list of a config names the module.

    An entry may be its full name, the name of a module that it is in, or a pattern `re:...`.
    """
    # Between dots a name matches whole parts alone: "gate" is none of "gate_proj".
    return any(
        re.match(pattern[3:], name) is not None
        if pattern.startswith("re:")
        else f".{pattern}." in f".{name}."
        for pattern in patterns
    )
