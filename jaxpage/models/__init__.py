"""Holds the model families, a page for each lineage, and the parts that they are made of.

A family has a config that is read from config.json, and is a Flax NNX module of `parts`, whose
layers declare their weights. The names are loaded at first use. Formats of quantised weights have a
door of their own, `jaxpage.models.quantization`. Other rooms take, of families:

    load_family          finds the family of a model
    register_model       adds a family
    FAMILIES             names the families by architecture
    ENTRY_POINTS         names the group of entry points by which packages add families
    Family               has a spec and a model
    Model                is the module of a model
    ModelSpec            says what config.json says of a model
    DecoderConfig        holds what the configs of most families say
    KVSpec               says what a sequence keeps for each position
    ConfigFields         reads the fields of a config
    FieldError           is an error about a field, the two others among them
    WrongField, RefusedField   say that a field makes no sense, or is not supported
    text_part            gives the config of the text model of a model that takes images
    leaves_tying_open    says whether only the files of such a model tie its head

Of modules and their weights:

    make_model           makes the module of a model without allocating memory
    abstract_model       gives the graph of a model and the shapes of its parameters
    abstract             gives those of any module
    Weight               is a parameter with its tensors in a checkpoint
    model_weights        lists the weights of a model
    weights_of           lists those of any module
    other_names          gives the other names of a tensor in a checkpoint
    num_bytes            counts the bytes of weights
    FLOATS               names the types that a model's weights may have
    find_ignored_tensors names the tensors of a checkpoint that are not loaded
    Path                 is the place of a module or parameter in a model
    Rule                 gives the modules that replace those of a family
    replace_modules      replaces them
    pack_modules         replaces those whose weights can be in panels
    Packing              says how a weight is packed

Of models that are divided among devices:

    make_sharding        decides how
    LOGICAL_SHARDS       is the number of parts where sums do not depend on the devices
    kv_of_shard          gives what a shard keeps
    Divisions            checks divisions of a model
    with_sharding        gives the rule that divides its layers
    ShardedWeight        is a weight with the parameters that have parts of it
    Place                is one of these parameters
    shard_weights        finds them
    join_weights         makes whole weights of them
    entry_at             gives the entry of a tree

And of what comes next to a model:

    LoRASpec, LoRATarget describe LoRA adapters, and a layer that takes them
    lora_targets         finds these layers
    adapter_weights      lists the weights of adapter slots
    Drafter              is a model that drafts for another one
    join                 makes it with the tables of the other one
    DraftModel           is a drafter with a family of its own
    EagleSpec, Eagle3Spec     are the specs of EAGLE heads
    MedusaSpec, MedusaHeads   are Medusa's heads
    MtpHead, MtpNames    are an MTP head, and the names of its tensors in a checkpoint
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpage.models.base import (
        Family,
        KVSpec,
        Model,
        ModelSpec,
        abstract,
        abstract_model,
        find_ignored_tensors,
        make_model,
        model_weights,
        other_names,
    )
    from jaxpage.models.config_fields import ConfigFields, FieldError, RefusedField, WrongField
    from jaxpage.models.dividing import (
        LOGICAL_SHARDS,
        Divisions,
        Place,
        ShardedWeight,
        entry_at,
        join_weights,
        kv_of_shard,
        make_sharding,
        shard_weights,
        with_sharding,
    )
    from jaxpage.models.draft_model import DraftModel
    from jaxpage.models.drafter import Drafter, join
    from jaxpage.models.eagle import Eagle3Spec, EagleSpec
    from jaxpage.models.fields import text_part
    from jaxpage.models.lora_layers import LoRASpec, LoRATarget, adapter_weights, lora_targets
    from jaxpage.models.medusa import MedusaHeads, MedusaSpec
    from jaxpage.models.mtp import MtpHead
    from jaxpage.models.mtp_names import MtpNames
    from jaxpage.models.multimodal import leaves_tying_open
    from jaxpage.models.packing import Packing, pack_modules
    from jaxpage.models.parts.decoder_config import DecoderConfig
    from jaxpage.models.registry import ENTRY_POINTS, FAMILIES, load_family, register_model
    from jaxpage.models.replacing import Path, Rule, replace_modules
    from jaxpage.models.weights import FLOATS, Weight, num_bytes, weights_of

__all__ = [
    "ENTRY_POINTS",
    "FAMILIES",
    "FLOATS",
    "LOGICAL_SHARDS",
    "ConfigFields",
    "DecoderConfig",
    "Divisions",
    "DraftModel",
    "Drafter",
    "Eagle3Spec",
    "EagleSpec",
    "Family",
    "FieldError",
    "KVSpec",
    "LoRASpec",
    "LoRATarget",
    "MedusaHeads",
    "MedusaSpec",
    "Model",
    "ModelSpec",
    "MtpHead",
    "MtpNames",
    "Packing",
    "Path",
    "Place",
    "RefusedField",
    "Rule",
    "ShardedWeight",
    "Weight",
    "WrongField",
    "abstract",
    "abstract_model",
    "adapter_weights",
    "entry_at",
    "find_ignored_tensors",
    "join",
    "join_weights",
    "kv_of_shard",
    "leaves_tying_open",
    "load_family",
    "lora_targets",
    "make_model",
    "make_sharding",
    "model_weights",
    "num_bytes",
    "other_names",
    "pack_modules",
    "register_model",
    "replace_modules",
    "shard_weights",
    "text_part",
    "weights_of",
    "with_sharding",
]

_HOMES = {
    "Family": "jaxpage.models.base",
    "KVSpec": "jaxpage.models.base",
    "Model": "jaxpage.models.base",
    "ModelSpec": "jaxpage.models.base",
    "abstract": "jaxpage.models.base",
    "abstract_model": "jaxpage.models.base",
    "find_ignored_tensors": "jaxpage.models.base",
    "make_model": "jaxpage.models.base",
    "model_weights": "jaxpage.models.base",
    "other_names": "jaxpage.models.base",
    "ConfigFields": "jaxpage.models.config_fields",
    "FieldError": "jaxpage.models.config_fields",
    "RefusedField": "jaxpage.models.config_fields",
    "WrongField": "jaxpage.models.config_fields",
    "DraftModel": "jaxpage.models.draft_model",
    "Drafter": "jaxpage.models.drafter",
    "join": "jaxpage.models.drafter",
    "Eagle3Spec": "jaxpage.models.eagle",
    "EagleSpec": "jaxpage.models.eagle",
    "text_part": "jaxpage.models.fields",
    "LoRASpec": "jaxpage.models.lora_layers",
    "LoRATarget": "jaxpage.models.lora_layers",
    "adapter_weights": "jaxpage.models.lora_layers",
    "lora_targets": "jaxpage.models.lora_layers",
    "MedusaHeads": "jaxpage.models.medusa",
    "MedusaSpec": "jaxpage.models.medusa",
    "MtpHead": "jaxpage.models.mtp",
    "MtpNames": "jaxpage.models.mtp_names",
    "leaves_tying_open": "jaxpage.models.multimodal",
    "Packing": "jaxpage.models.packing",
    "pack_modules": "jaxpage.models.packing",
    "ENTRY_POINTS": "jaxpage.models.registry",
    "FAMILIES": "jaxpage.models.registry",
    "load_family": "jaxpage.models.registry",
    "register_model": "jaxpage.models.registry",
    "Path": "jaxpage.models.replacing",
    "Rule": "jaxpage.models.replacing",
    "replace_modules": "jaxpage.models.replacing",
    "DecoderConfig": "jaxpage.models.parts.decoder_config",
    "Divisions": "jaxpage.models.dividing",
    "LOGICAL_SHARDS": "jaxpage.models.dividing",
    "Place": "jaxpage.models.dividing",
    "ShardedWeight": "jaxpage.models.dividing",
    "entry_at": "jaxpage.models.dividing",
    "join_weights": "jaxpage.models.dividing",
    "kv_of_shard": "jaxpage.models.dividing",
    "make_sharding": "jaxpage.models.dividing",
    "shard_weights": "jaxpage.models.dividing",
    "with_sharding": "jaxpage.models.dividing",
    "FLOATS": "jaxpage.models.weights",
    "Weight": "jaxpage.models.weights",
    "num_bytes": "jaxpage.models.weights",
    "weights_of": "jaxpage.models.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpage.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
