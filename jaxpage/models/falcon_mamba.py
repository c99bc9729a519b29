"""Falcon Mamba (TII, 2024) is Mamba 1 with RMS norms, without scales, of time steps, B and C."""

from __future__ import annotations

from dataclasses import replace

from jaxpage.layers.mamba1 import Mamba1Spec
from jaxpage.models import mamba
from jaxpage.models.fields import Fields
from jaxpage.models.mamba import Model, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]


class Spec(mamba.Spec):
    """Reads transformers' `FalconMambaConfig`."""

    model_type = "falcon_mamba"

    @classmethod
    def read_mamba(cls, fields: Fields) -> Mamba1Spec:
        """Returns the description of the layers."""
        epsilon = fields.number("mixer_rms_eps", 1e-6)
        return replace(super().read_mamba(fields), normed=True, plain_epsilon=epsilon)
