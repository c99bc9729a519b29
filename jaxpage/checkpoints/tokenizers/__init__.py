"""Loads tokenizers, and what lies next to them for pictures."""

from jaxpage.checkpoints.tokenizers.processor_files import (
    read_processor_files,  # reads the files that say how pictures are processed
)
from jaxpage.checkpoints.tokenizers.tokenizer_files import (
    ends_of_text,  # gives the ids that end a text
    load_tokenizer,  # loads the tokenizer of a directory or GGUF file
    tokenizer_of,  # loads the tokenizer of a configuration's model
)
