"""Runs steps on the device: step functions, the table of executables, and what runs next to them.

Nothing in this room sees a request. Its inner rooms are `hardware` (devices and kernels), `inputs`
(the shapes and the inputs of steps), `pages` (keys and values), `rows` (whole rows of tokens),
`drafters` and `vision` (encoders of pictures). Names are loaded at first use, so that a part that
asks for one of them does not load the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.compile_cache import (
        compile_cache_directory,  # says where executables are kept
        use_compile_cache,  # keeps executables across processes
    )
    from jaxpage.device.compiler_options import (
        check_graphs,  # refuses settings of CUDA graphs that have no effect
    )
    from jaxpage.device.drawn import unpack_drawn  # reads what a step has drawn
    from jaxpage.device.embedder import Embedder  # computes embeddings of prompts
    from jaxpage.device.encoder import (
        AnyEmbedder,  # is the type of what computes vectors
        TextEncoder,  # computes texts with a model whose tokens see each other both ways
        encoder_jobs,  # gives the calls that compile such a model
    )
    from jaxpage.device.executables import (
        Executables,  # holds the compiled steps
    )
    from jaxpage.device.host_weights import (
        to_device,  # moves the weights of a model that wakes to the device
        to_host,  # moves those of a model that sleeps to the host's memory
    )
    from jaxpage.device.packing import (
        Packings,  # says which weights are in panels, and how, by path
        make_packed_matmul,  # gives the product with one such weight
        pack_weights,  # puts weights into panels
        unpack_weight,  # gives one of them as it was
        unpack_weights,  # gives the weights of a model as they were
    )
    from jaxpage.device.routes import routed_layers  # finds the layers of a model with experts
    from jaxpage.device.steps import (
        SCORED_AT_ONCE,  # is the number of tokens that are scored at once
        StepOptions,  # says what a step is compiled for
    )
    from jaxpage.device.stored_executables import (
        open_stored_executables,  # finds those that the engine itself has kept
    )

__getattr__, __dir__ = open_door(__name__)
