"""Holds the model families, one file each.

A family has a spec that is read from config.json, and Flax NNX modules that declare their weights.
"""

from jaxpage.models.base import Family, Model, ModelSpec
from jaxpage.models.registry import load_family

__all__ = ["Family", "Model", "ModelSpec", "load_family"]
