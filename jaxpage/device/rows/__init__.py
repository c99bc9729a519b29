"""Computes whole rows of tokens as functions of the parameters, with the bits of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.rows.prompt_logits import (
        logits_of_prompt,  # computes the logits after every token of a prompt
    )
    from jaxpage.device.rows.row_model import RowModel  # computes logits, with derivatives

__getattr__, __dir__ = open_door(__name__)
