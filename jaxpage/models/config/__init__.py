"""Reads the fields of config.json, with the defaults of their classes in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.config.config_fields import (
        ConfigFields,  # reads the fields of a config
        FieldError,  # is an error about a field, the two others among them
        RefusedField,  # says that a field is not supported
        WrongField,  # says that a field makes no sense
    )
    from jaxpage.models.config.fields import (
        text_part,  # gives the config of the text model of a model that takes images
    )

__getattr__, __dir__ = open_door(__name__)
