"""Makes pictures ready for a model: loads them, processes them, and writes their placeholders.

A picture fills positions of a prompt, and the model's files say which:

    bytes ──load_picture──▶ RGB ──processor──▶ arrays, key ──expand──▶ token ids, spans
            limits, EXIF          of the model              rule of the family

Nothing here runs on a device.
"""

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.images.content import (
        PICTURE_TYPES,  # are the types of parts that are pictures, in Python
        parts_of_content,  # gives the content of a message as parts
        picture_in,  # gives the picture of a part
        takes_parts_alone,  # says whether a chat template shows no content that is a text
    )
    from jaxpage.images.last_used import (
        LastUsed,  # keeps what was made of the pictures that were used last
    )
    from jaxpage.images.loading import (
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
        ReadyPicture,  # holds a picture with its key and its placeholders
    )
    from jaxpage.images.processor_settings import (
        ProcessorSettings,  # names a model's image processor, with its arguments
        read_settings,  # gives the settings in a model's files
    )
    from jaxpage.images.sources import (
        MAX_PIXELS,  # is the most pixels of a picture
        base64_in,  # gives the base64 in a data URL
        decode_base64,  # gives the bytes of a text in base64
    )

__getattr__, __dir__ = open_door(__name__)
