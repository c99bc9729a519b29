"""Reads the fields of config.json, with the defaults of their classes in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.config.config_fields import (
        ConfigFields,  # reads the fields of a config
        FieldError,  # is an error about a field, the two others among them
    )
    from jaxpage.models.config.fields import (
        Fields,  # reads the fields of a family, with the defaults of its class
        text_part,  # gives the config of the text model of a model that takes images
    )

__getattr__, __dir__ = open_door(__name__)
