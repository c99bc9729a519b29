"""What a quantised checkpoint is to the models: which modules are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flax import nnx

from jaxpage.errors import CheckpointError
from jaxpage.layers.linear import Linear
from jaxpage.layers.quantized import QuantizedLinear, WeightFormat
from jaxpage.models.replacing import Path, Rule


@dataclass(frozen=True)
class Scheme:
    """name: as the setting `quantization` has it. described: for people.

    form_of: the format of the linear module of that name in the checkpoint; None: it is not quantised.
    ignored: globs over names of tensors that say nothing that is not known already.
    """

    name: str
    described: str
    form_of: Callable[[str], WeightFormat | None]
    ignored: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule:
        return self._replacement

    def _replacement(self, path: Path, module: nnx.Module) -> nnx.Module | None:
        if not isinstance(module, Linear):
            return None
        names = [part.name for part in module.spec.parts if part.name is not None] or [module.spec.fused or ""]
        forms = [self.form_of(name) for name in names]
        if any(form != forms[0] for form in forms):
            raise CheckpointError(f"config.json: {', '.join(names)} are one product, and must be quantised alike")
        return QuantizedLinear(module.spec, forms[0]) if forms[0] is not None else None


def everywhere_but(kept: Sequence[str], form: WeightFormat) -> Callable[[str], WeightFormat | None]:
    """`Scheme.form_of` for one format of all modules but the head and those that a config's list names."""
    return lambda name: None if matches(name, ("lm_head", *kept)) else form


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a list of a config names the module: in full, as one of the modules that it is in, or by a pattern `re:...`."""
    return any(
        re.match(pattern[3:], name) is not None if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns
    )
