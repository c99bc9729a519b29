"""Decides the shapes of steps, and packs their inputs into one transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.inputs.buckets import (
        Bucket,  # is the shape of a step
        BucketMenu,  # holds all shapes of an engine
        make_menu,  # makes it
        stream_sizes,  # gives the shapes of an encoder
    )
    from jaxpage.device.inputs.step_inputs import (
        Flags,  # names the places of a step's flags
        ProcessorInputs,  # holds the wide inputs of logits processors
        TableShape,  # is the shape of the block tables
        empty_inputs,  # makes the packed inputs of a step, and the fields to write them by
        processor_shapes,  # gives the shapes of the inputs of logits processors
        vector_shape,  # gives the shape of what may take the place of a token
    )

__getattr__, __dir__ = open_door(__name__)
