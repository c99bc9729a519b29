"""Runs steps on the device: pages, step functions, buckets, and the table of executables.

Nothing in this room sees a request. The names are loaded at first use, so that a part that asks for
one of them does not load the others. Other rooms take, to know a device before anything is on it:

    DeviceSpec           describes a device: its memory, its types, and its kernel sets
    open_devices         has JAX open its devices, with a share of a GPU's memory
    available_bytes      counts the bytes that engines may take of a device
    available_host_bytes counts the free bytes of host memory
    Backend              names the kernels that steps use
    choose_backend       chooses them by the settings and the device
    attention_sets       says which kernel sets compute attention
    cpp_compiler         gives the command of the compiler that makes kernels for CPUs
    cpu_kernels          says which kernels for CPUs there are
    processor            gives the name of the processor

For weights in panels, which kernels for CPUs multiply by:

    Packings             says how each of them is packed, by path
    pack_weights         packs them
    unpack_weights       gives the weights of a model as they were
    unpack_weight        gives one of them
    make_packed_product  gives the product with one weight

For the shapes and the inputs of steps:

    Bucket               is the shape of a step
    BucketMenu           holds all shapes of an engine
    make_menu            makes it
    TableShape           is the shape of the block tables
    empty_inputs         makes the packed inputs of a step, and the fields to write them by
    Flags                names the places of a step's flags
    ProcessorInputs      holds the wide inputs of logits processors
    processor_shapes     gives their shapes
    unpack_drawn         reads what a step has drawn

To compile and run them:

    DeviceMesh           holds the devices of an engine, and puts arrays on them
    make_mesh            takes the first devices that JAX has
    Executables          holds the compiled steps
    StepOptions          says what a step is compiled for
    SCORED_AT_ONCE       is the number of tokens that are scored at once
    check_graphs         refuses settings of CUDA graphs that have no effect
    use_compile_cache    keeps executables across processes
    compile_cache_directory   says where
    open_stored_executables   finds those that were kept by the engine itself

For keys and values:

    KVPages              holds the pages of all layers
    page_shapes          gives their shapes
    divide_shapes        gives them for a model that is divided
    page_dtype           gives the type of their numbers
    bytes_of_pages, bytes_per_layer   count their bytes
    HostPages            holds the blocks that are swapped out

For a model that sleeps:

    to_host              moves its weights to the host's memory
    to_device            moves them back

And for what runs next to the steps:

    Embedder             computes embeddings of prompts
    logits_of_prompt     computes the logits after every token of a prompt
    DeviceDrafter        drafts within a step
    HeadDrafter          does so with the heads of Medusa
    TopIdsDrafter        does so with the most likely tokens of the target itself
    ModelDrafter         does so with a model
    TreeShape            is the largest depth and width of its trees
    Choice               says how it chooses its tokens
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpage.device.backends import (
        Backend,
        attention_sets,
        choose_backend,
        cpp_compiler,
        cpu_kernels,
    )
    from jaxpage.device.buckets import Bucket, BucketMenu, make_menu
    from jaxpage.device.device_spec import DeviceSpec, available_bytes, available_host_bytes
    from jaxpage.device.drafter import DeviceDrafter, HeadDrafter, TopIdsDrafter
    from jaxpage.device.drafting import Choice, ModelDrafter, TreeShape
    from jaxpage.device.embedder import Embedder
    from jaxpage.device.executables import Executables, check_graphs, use_compile_cache
    from jaxpage.device.gpu_memory import open_devices
    from jaxpage.device.host_pages import HostPages
    from jaxpage.device.host_processor import processor
    from jaxpage.device.host_weights import to_device, to_host
    from jaxpage.device.kv_pages import (
        KVPages,
        bytes_of_pages,
        bytes_per_layer,
        divide_shapes,
        page_dtype,
        page_shapes,
    )
    from jaxpage.device.mesh import DeviceMesh, make_mesh
    from jaxpage.device.packing import (
        Packings,
        make_packed_product,
        pack_weights,
        unpack_weight,
        unpack_weights,
    )
    from jaxpage.device.prompt_logits import logits_of_prompt
    from jaxpage.device.step_inputs import (
        Flags,
        ProcessorInputs,
        TableShape,
        empty_inputs,
        processor_shapes,
    )
    from jaxpage.device.steps import SCORED_AT_ONCE, StepOptions, unpack_drawn
    from jaxpage.device.stored_executables import compile_cache_directory, open_stored_executables

__all__ = [
    "SCORED_AT_ONCE",
    "Backend",
    "Bucket",
    "BucketMenu",
    "Choice",
    "DeviceDrafter",
    "DeviceMesh",
    "DeviceSpec",
    "Embedder",
    "Executables",
    "Flags",
    "HeadDrafter",
    "HostPages",
    "KVPages",
    "ModelDrafter",
    "Packings",
    "ProcessorInputs",
    "StepOptions",
    "TableShape",
    "TopIdsDrafter",
    "TreeShape",
    "attention_sets",
    "available_bytes",
    "available_host_bytes",
    "bytes_of_pages",
    "bytes_per_layer",
    "check_graphs",
    "choose_backend",
    "compile_cache_directory",
    "cpp_compiler",
    "cpu_kernels",
    "divide_shapes",
    "empty_inputs",
    "logits_of_prompt",
    "make_menu",
    "make_mesh",
    "make_packed_product",
    "open_devices",
    "open_stored_executables",
    "pack_weights",
    "page_dtype",
    "page_shapes",
    "processor",
    "processor_shapes",
    "to_device",
    "to_host",
    "unpack_drawn",
    "unpack_weight",
    "unpack_weights",
    "use_compile_cache",
]

_HOMES = {
    "Backend": "jaxpage.device.backends",
    "attention_sets": "jaxpage.device.backends",
    "choose_backend": "jaxpage.device.backends",
    "cpp_compiler": "jaxpage.device.backends",
    "cpu_kernels": "jaxpage.device.backends",
    "Bucket": "jaxpage.device.buckets",
    "BucketMenu": "jaxpage.device.buckets",
    "make_menu": "jaxpage.device.buckets",
    "DeviceSpec": "jaxpage.device.device_spec",
    "available_bytes": "jaxpage.device.device_spec",
    "available_host_bytes": "jaxpage.device.device_spec",
    "DeviceDrafter": "jaxpage.device.drafter",
    "HeadDrafter": "jaxpage.device.drafter",
    "TopIdsDrafter": "jaxpage.device.drafter",
    "Choice": "jaxpage.device.drafting",
    "ModelDrafter": "jaxpage.device.drafting",
    "TreeShape": "jaxpage.device.drafting",
    "Embedder": "jaxpage.device.embedder",
    "Executables": "jaxpage.device.executables",
    "check_graphs": "jaxpage.device.executables",
    "use_compile_cache": "jaxpage.device.executables",
    "open_devices": "jaxpage.device.gpu_memory",
    "HostPages": "jaxpage.device.host_pages",
    "to_device": "jaxpage.device.host_weights",
    "to_host": "jaxpage.device.host_weights",
    "KVPages": "jaxpage.device.kv_pages",
    "bytes_of_pages": "jaxpage.device.kv_pages",
    "bytes_per_layer": "jaxpage.device.kv_pages",
    "divide_shapes": "jaxpage.device.kv_pages",
    "page_dtype": "jaxpage.device.kv_pages",
    "page_shapes": "jaxpage.device.kv_pages",
    "DeviceMesh": "jaxpage.device.mesh",
    "make_mesh": "jaxpage.device.mesh",
    "Packings": "jaxpage.device.packing",
    "pack_weights": "jaxpage.device.packing",
    "make_packed_product": "jaxpage.device.packing",
    "unpack_weight": "jaxpage.device.packing",
    "unpack_weights": "jaxpage.device.packing",
    "processor": "jaxpage.device.host_processor",
    "logits_of_prompt": "jaxpage.device.prompt_logits",
    "Flags": "jaxpage.device.step_inputs",
    "ProcessorInputs": "jaxpage.device.step_inputs",
    "TableShape": "jaxpage.device.step_inputs",
    "empty_inputs": "jaxpage.device.step_inputs",
    "processor_shapes": "jaxpage.device.step_inputs",
    "SCORED_AT_ONCE": "jaxpage.device.steps",
    "StepOptions": "jaxpage.device.steps",
    "unpack_drawn": "jaxpage.device.steps",
    "compile_cache_directory": "jaxpage.device.stored_executables",
    "open_stored_executables": "jaxpage.device.stored_executables",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpage.device' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
