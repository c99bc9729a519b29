"""Makes an engine from settings: describes, decides, compiles and assembles it.

No step needs anything of this room, and the engine never imports it. Other rooms take:

    build_engine       makes an engine in four calls
    Built, BuiltModel  the engine with what its callers need; the part of an LLM that knows its
    model
    Hooks, NO_HOOKS    listen to the phases of a start; ignore them
    PHASES             are the names of these phases
    Described          describes a model with these settings on a device
    MemoryPlan         says where the memory of a device goes
    ModelLayout        the types of a model's numbers, and the number of its devices
    EngineSpec, engine_spec_of  everything that is decided before anything is compiled
    choose_dtype, choose_kv_cache_dtype  decide what "auto" means
    notices, find_refused_settings  warn about settings; name those that cannot be honoured
    refuse_recurrent   refuses recurrent layers
    lora_spec          says which adapters an engine takes
    Drafting, open_drafting, drafter_directory  find a model's drafter, and describe it
    shards_of_weights  says which part of a weight each device has
    Mode, load_given_weights, check_replaceable, weights_on_device  take other weights
    weights_for_waking  gives a model that sleeps its weights again
    chat_defaults      gives the sampling parameters of a chat that a model's files do not set
"""

from jaxpage.assembly.assembling import Built
from jaxpage.assembly.build import NO_HOOKS, build_engine
from jaxpage.assembly.built_model import BuiltModel
from jaxpage.assembly.capacity import find_refused_settings, notices
from jaxpage.assembly.compiling import shards_of_weights
from jaxpage.assembly.described import Described, ModelLayout
from jaxpage.assembly.describing import choose_dtype, choose_kv_cache_dtype, lora_spec
from jaxpage.assembly.drafters import drafter_directory
from jaxpage.assembly.drafting import Drafting, open_drafting
from jaxpage.assembly.engine_spec import EngineSpec, engine_spec_of
from jaxpage.assembly.hooks import PHASES, Hooks
from jaxpage.assembly.layer_kinds import refuse_recurrent
from jaxpage.assembly.model_weights import (
    Mode,
    check_replaceable,
    load_given_weights,
    weights_for_waking,
    weights_on_device,
)
from jaxpage.assembly.sampling_defaults import chat_defaults
from jaxpage.assembly.sizing import MemoryPlan

__all__ = [
    "NO_HOOKS",
    "PHASES",
    "Built",
    "BuiltModel",
    "Described",
    "Drafting",
    "EngineSpec",
    "Hooks",
    "MemoryPlan",
    "Mode",
    "ModelLayout",
    "build_engine",
    "chat_defaults",
    "check_replaceable",
    "choose_dtype",
    "choose_kv_cache_dtype",
    "drafter_directory",
    "engine_spec_of",
    "find_refused_settings",
    "load_given_weights",
    "lora_spec",
    "notices",
    "open_drafting",
    "refuse_recurrent",
    "shards_of_weights",
    "weights_for_waking",
    "weights_on_device",
]
