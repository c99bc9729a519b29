"""Loads tokenizers, and what lies next to them for pictures.

The names are loaded at first use, since transformers takes a second to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.checkpoints.tokenizers.model_tokenizer import (
        ends_of_text,  # gives the ids that end a text
        tokenizer_of,  # opens the tokenizer of a configuration's model
    )
    from jaxpage.checkpoints.tokenizers.processor_files import (
        read_processor_files,  # reads the files that say how pictures are processed
    )
    from jaxpage.checkpoints.tokenizers.stored_tokenizers import (
        open_tokenizer,  # opens the tokenizer of a directory or GGUF file, sooner if it is stored
        whole_tokenizer,  # gives the tokenizer of transformers for an opened one
    )
    from jaxpage.checkpoints.tokenizers.tokenizer_files import (
        load_tokenizer,  # loads the tokenizer of a directory or GGUF file by transformers
    )

__getattr__, __dir__ = open_door(__name__)
