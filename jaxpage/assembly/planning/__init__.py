"""Plans an engine: its drafter, its memory, its cache groups and the shapes of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.assembly.planning.capacity import (
        find_refused_settings,  # names settings that cannot be honoured
        notices,  # warn about settings
    )
    from jaxpage.assembly.planning.described import (
        Described,  # describes a model with these settings on a device
        ModelLayout,  # says which types a model's numbers have, and on how many devices they are
    )
    from jaxpage.assembly.planning.drafters import (
        drafter_directory,  # finds the directory of a drafter
    )
    from jaxpage.assembly.planning.drafting import (
        Drafting,  # holds a model's drafter
        open_drafting,  # opens a model's drafter
    )
    from jaxpage.assembly.planning.engine_spec import (
        EngineSpec,  # holds everything that is decided before anything is compiled
        engine_spec_of,  # decides it
    )
    from jaxpage.assembly.planning.layer_kinds import (
        refuse_recurrent,  # refuses recurrent layers
    )
    from jaxpage.assembly.planning.sizing import (
        MemoryPlan,  # says where the memory of a device goes
    )
    from jaxpage.assembly.planning.vectors import (
        find_vision,  # finds the encoder of pictures of a model
        vector_input,  # says what may take the place of tokens in prompts
    )

__getattr__, __dir__ = open_door(__name__)
