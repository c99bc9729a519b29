"""Drafts on the device, in the executable of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.drafters.assistant import (
        AssistantDrafter,  # drafts with an assistant of Gemma 4
    )
    from jaxpage.device.drafters.drafter import (
        DeviceDrafter,  # drafts within a step
        HeadDrafter,  # does so with the heads of Medusa
        TopIdsDrafter,  # does so with the most likely tokens of the target itself
    )
    from jaxpage.device.drafters.drafting import (
        ModelDrafter,  # drafts with a model
    )
    from jaxpage.device.drafters.growing import (
        Choice,  # says how a model that drafts chooses its tokens
    )
    from jaxpage.device.drafters.tree_shape import (
        TreeShape,  # is the largest depth and width of its trees
    )

__getattr__, __dir__ = open_door(__name__)
