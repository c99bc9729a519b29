"""Runs encoders of pictures, whose rows take the place of tokens in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.vision.vision_step import (
        sizes_for,  # gives the numbers of patches for which an encoder is compiled
        vision_jobs,  # gives the calls that compile an encoder of pictures
        vision_key,  # names its executable for a number of patches
        vision_model,  # gives the module of an encoder, and which of its weights are in panels
        without_vision,  # gives the weights of the other parts of a model
    )

__getattr__, __dir__ = open_door(__name__)
