"""Has the names of `parts.latent` for families that are no pages yet."""

from __future__ import annotations

from jaxpage.models.parts.latent import LatentSpec, latent_attention, read_latent, read_widths

__all__ = ["LatentSpec", "latent_attention", "read_latent", "read_widths"]
