"""Opens the MTP head inside a model's checkpoint from headers alone, and loads it.

The tensors decide: a config may count heads that whoever converted the checkpoint left out, and
say that modules are quantised which are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxpage.checkpoints.drafters.eagle_files import TABLES, find_shared_table
from jaxpage.checkpoints.fitting import CODES, LoadPlan, fit_stored
from jaxpage.checkpoints.in_memory.parameters import array_headers
from jaxpage.checkpoints.loading import load_weights
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.quantization import Scheme
from jaxpage.checkpoints.safetensors_files import read_tensors
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.errors import UnsupportedError
from jaxpage.models import DecoderConfig, Family, other_names
from jaxpage.models.drafters import MtpHead, MtpNames
from jaxpage.models.parameters import replace_modules, weights_of

WHAT = "speculative_config: method 'mtp'"


@dataclass(frozen=True)
class MtpFiles:
    """Holds a head that fits its model. Only headers have been read.

    Attributes:
        spec: The spec of the model.
        family: The family of the model.
        names: The names of the head's tensors.
        scheme: The scheme of those of its modules that are quantised.
        plan: The tensors that fill its parameters.
    """

    spec: DecoderConfig
    family: Family
    names: MtpNames
    scheme: Scheme | None
    plan: LoadPlan

    def make(self, dtype: DTypeLike) -> MtpHead:
        """Returns the module, whose parameters have this type."""
        head = MtpHead(self.spec, self.family, self.names, dtype=dtype)
        if self.scheme is not None:
            replace_modules(head, self.scheme.rule)
        return head


def open_mtp(target: ModelFiles) -> MtpFiles:
    """Opens the head of a model.

    Raises:
        CheckpointError: The checkpoint has no head, or a part of one, or one that does not fit.
        UnsupportedError: Heads of this family, of this number or in this layout are not read.
    """
    spec = target.spec
    names = getattr(spec, "draft_heads", None)
    if not isinstance(spec, DecoderConfig) or names is None:
        raise UnsupportedError(
            f"{WHAT} needs a model with MTP heads, and config.json in {target.directory} counts "
            "none (num_nextn_predict_layers, mtp_num_hidden_layers); use another method"
        )
    if target.plan.layout not in ("safetensors", "memory"):
        raise UnsupportedError(
            f"{WHAT} reads heads in safetensors files and in arrays by name alone, and "
            f"{target.directory} is in the layout {target.plan.layout!r}; use the published "
            "checkpoint"
        )
    problems = Problems(target.directory)
    in_memory = target.plan.is_in_memory
    headers = (
        array_headers(target.plan.arrays) if in_memory else read_tensors(target.directory, problems)
    )
    stored = {name: info for name, info in headers.items() if name.startswith(names.prefixes)}
    _check_count(names, stored, problems)
    if not all(find_shared_table(name, target) for name in TABLES):
        problems.add(
            f"{WHAT} takes the model's token table and head, which are quantised: use a model "
            "whose lm_head is not, or another method"
        )
    problems.raise_if_any()
    scheme = target.quantization
    if scheme is not None:
        scheme = scheme.of_stored({name for name, info in stored.items() if info.dtype in CODES})
    files = MtpFiles(spec, target.family, names, scheme, replace(target.plan, parameters=()))
    with problems.collect():
        names_of = functools.partial(other_names, target.family)
        weights = weights_of(files.make("float32"), names_of)
        plan = fit_stored(
            files.plan,
            stored,
            weights,
            names.shared,
            problems,
            compare=not in_memory,
            scheme=files.scheme,
        )
        files = replace(files, plan=plan)
    problems.raise_if_any()
    return files


def load_mtp(
    files: MtpFiles, dtype: str, put: Callable[[np.ndarray], Any], *, progress: bool = False
) -> dict[str, Any]:
    """Returns the parameters as `models.drafters.join` takes them, each one `put(array)`."""
    return dict.fromkeys(TABLES) | load_weights(files.plan, dtype, put, progress=progress)


def _check_count(names: MtpNames, stored: Mapping[str, TensorInfo], problems: Problems) -> None:
    if not stored:
        problems.add(
            f"{WHAT} needs the tensors {names.layer}.*, and there are none (config.json counts "
            f"{names.count} in {names.field}): use a checkpoint that has them, or another method"
        )
    elif names.count != 1:
        problems.add(
            f"{WHAT} takes one head, which drafts every token, and config.json counts "
            f"{names.count} in {names.field}: use another method"
        )
    elif names.refusal:
        problems.add(f"{WHAT} is not supported: {names.refusal}; use another method")
