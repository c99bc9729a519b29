"""Holds the model families, a page for each lineage, and the parts that they are made of.

A family has a config that is read from config.json, and is a Flax NNX module of `parts`, whose
layers declare their weights. The names are loaded at first use. The inner rooms are `config` (the
fields of config.json), `parameters` (weights and what replaces modules by path), `sharding`
(several devices) and `drafters` (models that draft).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.base import (
        Family,  # has a spec and a model
        KVSpec,  # says what a sequence keeps for each position
        Model,  # is the module of a model
        ModelSpec,  # says what config.json says of a model
        abstract,  # gives the graph of a module and the shapes of its parameters
        abstract_model,  # gives those of a model
        find_ignored_tensors,  # names the tensors of a checkpoint that are not loaded
        make_model,  # makes the module of a model without allocating memory
        model_weights,  # lists the weights of a model
        other_names,  # gives the other names of a tensor in a checkpoint
    )
    from jaxpage.models.multimodal import (
        leaves_tying_open,  # says whether only the files of such a model tie its head
    )
    from jaxpage.models.parts.decoder_config import (
        DecoderConfig,  # holds what the configs of most families say
    )
    from jaxpage.models.parts.encoder_config import (
        EncoderConfig,  # holds what the configs of encoders say
        distance_buckets,  # gives the rows of a bias by distance
    )
    from jaxpage.models.registry import (
        ENCODERS,  # names the families of encoders by architecture
        ENTRY_POINTS,  # names the group of entry points by which packages add families
        FAMILIES,  # names the families by architecture
        load_family,  # finds the family of a model
        register_model,  # adds a family
    )

__getattr__, __dir__ = open_door(__name__)
