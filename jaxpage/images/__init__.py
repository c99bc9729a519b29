"""Makes pictures ready for a model: loads them, processes them, and writes their placeholders.

A picture fills positions of a prompt, and the model's files say which:

    bytes ──load_picture──▶ RGB ──processor──▶ arrays, key ──expand──▶ token ids, spans
            limits, EXIF          of the model              rule of the family

Nothing here runs on a device.
"""

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.images.loading import (
        MAX_PIXELS,  # is the most pixels of a picture
        decode_base64,  # gives the bytes of a text in base64
        decode_data_url,  # gives the bytes of a data URL
        load_picture,  # gives a picture as RGB
    )
    from jaxpage.images.placeholders import (
        PlaceholderRule,  # says what stands for a picture in a prompt
        rule_of,  # gives the rule of a model
    )
    from jaxpage.images.processing import (
        process_picture,  # gives the arrays of a picture
    )
    from jaxpage.images.processor import (
        PictureProcessor,  # processes the pictures of one model, and expands its prompts
        ProcessedPicture,  # holds a picture with its key and its placeholders
    )
    from jaxpage.images.processor_settings import (
        ProcessorSettings,  # names a model's image processor, with its arguments
        read_settings,  # gives the settings in a model's files
    )

__getattr__, __dir__ = open_door(__name__)
