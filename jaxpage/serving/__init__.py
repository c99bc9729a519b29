"""Serves a model over HTTP as OpenAI's API does, and shows its engine on the inspector page.

The server reads requests (`wire/`), also those of other APIs (`dialects/`), answers them with the
engine (`requests/`), limits what connections may do (`http/`), is watched (`metrics/`,
`inspector/`), and leads an engine that several hosts share (`hosts/`). A driver runs the engine on
a thread of its own.

The names are loaded at first use, so that a configuration is checked, and the address bound, before
jax and Starlette are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.serving.batches.run_batch import (
        run_batch,  # answers a file of requests in OpenAI's batch format
    )
    from jaxpage.serving.hosts.job import (
        hosts_of_job,  # takes the hosts from the job that runs the process
    )
    from jaxpage.serving.hosts.processes import (
        find_job,  # asks JAX for the job that the process belongs to
    )
    from jaxpage.serving.http.listening import bind_socket  # binds the address of the server
    from jaxpage.serving.inspector.recorded import (
        write_snapshots,  # writes what the page shows of a recorded event log
    )
    from jaxpage.serving.metrics.incident_files import (
        open_incidents,  # lets an engine keep its last steps, for when something goes wrong
    )
    from jaxpage.serving.settings.resolving import (
        resolve_both,  # finds the settings of engine and server, and where each comes from
    )
    from jaxpage.serving.settings.server_config import (
        AUTO,  # is the coordinator's address that a job says itself
        ServerConfig,  # holds the settings of the server
    )
    from jaxpage.serving.several.models_file import read_models_file  # reads which models these are
    from jaxpage.serving.several.starting import (
        start_several,  # runs a server of several models, which are loaded when they are asked for
    )
    from jaxpage.serving.startup import (
        follow,  # runs the engine of another rank than 0, as rank 0 tells it
        start,  # runs a server until a signal ends it
    )
    from jaxpage.serving.wire.derived_forms import (
        derive_form,  # derives how a model writes tool calls and reasoning, from its tokenizer
        derive_from,  # does so from a template
    )
    from jaxpage.serving.wire.logprobs import TokenTexts  # gives the text of each token

__getattr__, __dir__ = open_door(__name__)
