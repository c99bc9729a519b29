"""Reads `quant_method: mxfp4`, as GPT-OSS is published.

The weights of experts have four bits; all others are not quantised.
"""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import Scheme, matches
from jaxpage.errors import CheckpointError
from jaxpage.layers.expert_linear import MXFP4_GROUP, ExpertLinear, MXFP4ExpertLinear
from jaxpage.models.parameters import Path

NAME = "mxfp4"
SIZE_FIELDS = ""
EXCLUDED_FIELD = "modules_to_not_convert"


@dataclass(frozen=True)
class ExpertScheme(Scheme):
    """A scheme that quantises only experts.

    Attributes:
        excluded: The names of modules that are not quantised (see `matches`).
    """

    excluded: tuple[str, ...] = ()

    def _replacement(self, path: Path, module: nnx.Module) -> nnx.Module | None:
        if not isinstance(module, ExpertLinear) or matches(module.spec.name, self.excluded):
            return None
        if module.spec.aliases:  # No file has tensors of this format under other names.
            return None
        if module.spec.num_in % MXFP4_GROUP:
            raise CheckpointError(
                f"config.json: {module.spec.name} has {module.spec.num_in} inputs, and in "
                f"MXFP4 {MXFP4_GROUP} share a scale"
            )
        return MXFP4ExpertLinear(module.spec)


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    excluded = config.names(EXCLUDED_FIELD)
    return ExpertScheme(NAME, "experts in MXFP4", lambda *names: None, excluded=excluded)
