"""Reads what drafts next to a model: Medusa's heads, EAGLE and MTP heads, and assistants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.checkpoints.drafters.assistant_files import (
        is_assistant,  # says if a directory has an assistant of Gemma 4
        load_assistant,  # loads one
        open_assistant,  # opens one
    )
    from jaxpage.checkpoints.drafters.eagle_files import (
        EAGLE_FILES,  # names the files of an EAGLE head
        EagleMethod,  # is the kind of head
        load_eagle,  # loads an EAGLE head
        open_eagle,  # opens an EAGLE head
    )
    from jaxpage.checkpoints.drafters.medusa_files import (
        MEDUSA_FILES,  # names the files of Medusa's heads
        MedusaFiles,  # holds Medusa's heads
        load_medusa,  # loads them
        open_medusa,  # opens them
    )
    from jaxpage.checkpoints.drafters.mtp_files import (
        load_mtp,  # loads the MTP head inside a checkpoint
        open_mtp,  # opens it
    )

__getattr__, __dir__ = open_door(__name__)
