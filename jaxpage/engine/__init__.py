"""Runs the engine's steps; only here do the host rooms and the device rooms meet.

The inner room `calls` has what callers give, and what they get for it.
"""

from jaxpage.engine.adapters import (
    Adapters,  # keeps the LoRA adapters that are read, and those in slots on the device
    directory_of,  # gives the directory of an adapter
)
from jaxpage.engine.admission import (
    AdmissionRules,  # holds what the model and the settings admit
    CheckedParams,  # holds parameters that fit the model
    NamedAdapter,  # holds an adapter that was read and fits the model
    PreparedRequest,  # holds a request that can be added to the engine
)
from jaxpage.engine.batch_builder import (
    Batch,  # holds a step that is ready for the device
    BatchBuilder,  # builds the batches of plans
)
from jaxpage.engine.engine import (
    Engine,  # calls the scheduler and the runner in turn
)
from jaxpage.engine.picture_encoder import (
    PictureEncoder,  # encodes pictures, and keeps what it has encoded
)
from jaxpage.engine.reporting import (
    Reporter,  # reports on one request
)
from jaxpage.engine.runner import (
    Runner,  # runs batches by the table of executables
    WakingWeights,  # holds the weights with which one sleep ends
)
from jaxpage.engine.strategies import (
    EngineParts,  # holds the parts of an engine that may be replaced
)
from jaxpage.engine.text import (
    NoText,  # gives no text, for a model without a tokenizer
    StreamDetokenizer,  # makes the text of one sequence as its tokens come
    token_bytes,  # gives the bytes that a token stands for
)
from jaxpage.engine.vector_sources import (
    NO_PICTURES,  # says that a model takes no pictures
    VectorSources,  # keeps what takes the place of tokens in prompts
)
