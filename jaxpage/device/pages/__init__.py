"""Holds keys and values: the pages of all layers on the device, and those in the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.pages.host_pages import HostPages  # holds the blocks that are swapped out
    from jaxpage.device.pages.kv_pages import (
        KVPages,  # holds the pages of all layers
        bytes_of_pages,  # counts their bytes
        bytes_per_layer,  # counts the bytes of a block in each layer
        divide_shapes,  # gives their shapes for a model that is divided
        page_dtype,  # gives the type of their numbers
        page_shapes,  # gives their shapes
    )

__getattr__, __dir__ = open_door(__name__)
