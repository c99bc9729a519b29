"""What this version understands but does not honour yet, so that the engine refuses it instead of ignoring it."""

from __future__ import annotations

from jaxpage.argument_checks import shown
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

# These change nothing at their default; any other value asks for something that no part of this version does.
_UNSUPPORTED_FIELDS: tuple[str, ...] = ()
_NEUTRAL = SamplingParams()


def unsupported(params: SamplingParams | BeamSearchParams) -> list[str]:
    """The parameters of `params` that this version cannot honour, as `name=value`; empty when all of them are honoured."""
    if isinstance(params, BeamSearchParams):
        return []
    asked = {name: getattr(params, name) for name in _UNSUPPORTED_FIELDS}
    return [f"{name}={shown(value)}" for name, value in asked.items() if value != getattr(_NEUTRAL, name)]
