"""Reads the fields of config.json, with the defaults of their classes in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.config.config_fields import (
        ConfigFields,  # reads the fields of a config
        FieldError,  # is an error about a field, the two others among them
    )
    from jaxpage.models.config.expert_fields import (
        CORRECTED,  # has the defaults of DeepSeek-V3
        ExpertDefaults,  # says what absent fields of experts mean to a family
    )
    from jaxpage.models.config.fields import (
        NO_ROPE,  # has the fields of a rotation, with values that say none
        REQUIRED,  # is in the place of a default where there is none
        Fields,  # reads the fields of a family, with the defaults of its class
        text_part,  # gives the config of the text model of a model that takes images
        without_axes,  # gives a config without the axes of positions
    )
    from jaxpage.models.config.mtp_names import (
        MtpNames,  # names the tensors of an MTP head in a checkpoint
    )

__getattr__, __dir__ = open_door(__name__)
