"""Holds what drafts for a model: EAGLE and MTP heads, Medusa's, assistants, and small models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.config.mtp_names import (
        MtpNames,  # names the tensors of an MTP head in a checkpoint
    )
    from jaxpage.models.drafters.assistant import (
        Assistant,  # is an assistant of Gemma 4
        AssistantSpec,  # is its spec
        Centroids,  # says which tokens have logits
        find_target_layers,  # finds the layers of the target whose pages it reads
        follow_target,  # returns the config of its layers
    )
    from jaxpage.models.drafters.draft_model import (
        DraftModel,  # is a drafter with a family of its own
    )
    from jaxpage.models.drafters.drafter import (
        Drafter,  # is a model that drafts for another one
        join,  # makes it with the tables of the other one
    )
    from jaxpage.models.drafters.eagle import (
        Eagle3Spec,  # is the spec of a head of EAGLE-3
        EagleSpec,  # is the spec of a head of EAGLE-1
    )
    from jaxpage.models.drafters.medusa import (
        MedusaHeads,  # are Medusa's heads
        MedusaSpec,  # is their spec
    )
    from jaxpage.models.drafters.mtp import MtpHead  # is an MTP head

__getattr__, __dir__ = open_door(__name__)
