"""Model families, one file each: a spec read from config.json, and Flax NNX modules that declare their weights."""

from jaxpage.models.base import Family, Model, ModelSpec
from jaxpage.models.registry import load_family

__all__ = ["Family", "Model", "ModelSpec", "load_family"]
