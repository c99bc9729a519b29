"""Makes an engine from settings: describes, decides, compiles and assembles it.

No step needs anything of this room, and the engine never imports it. The inner room `planning` has
what is decided before anything is loaded or compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.assembly.assembling import (
        Built,  # holds the engine with what its callers need
    )
    from jaxpage.assembly.build import (
        NO_HOOKS,  # ignores the phases
        build_engine,  # makes an engine in four calls
    )
    from jaxpage.assembly.built_model import (
        BuiltModel,  # is the part of an LLM that knows its model
    )
    from jaxpage.assembly.compiling import (
        shards_of_weights,  # says which part of a weight each device has
    )
    from jaxpage.assembly.describing import (
        choose_dtype,  # decides what "auto" means for the weights
        choose_kv_cache_dtype,  # decides what "auto" means for the KV cache
        lora_spec,  # says which adapters an engine takes
    )
    from jaxpage.assembly.hooks import (
        PHASES,  # are the names of the phases of a start
        Hooks,  # listen to the phases of a start
    )
    from jaxpage.assembly.model_weights import (
        check_replaceable,  # refuses to replace the weights of some models
        checkpoint_parts,  # gives loaded weights as their checkpoint has them
        load_given_weights,  # loads weights that are arrays
        weights_for_waking,  # gives a model that sleeps its weights again
        weights_on_device,  # loads the weights of another checkpoint
    )
    from jaxpage.assembly.pictures import (
        open_pictures,  # reads what a model's files say of pictures
    )
    from jaxpage.assembly.receipt_facts import (
        describe_engine,  # says what the bits of an engine depend on
        hash_model,  # hashes the weights of a model
    )
    from jaxpage.assembly.sampling_defaults import (
        chat_defaults,  # gives the sampling parameters of a chat that a model's files do not set
    )

__getattr__, __dir__ = open_door(__name__)
