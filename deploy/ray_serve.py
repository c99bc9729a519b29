"""Servers that Ray Serve starts and stops by how many requests wait: serve run deploy.ray_serve:app

pip install 'jaxpage[ray]'. One engine for each replica; for GPUs put {"num_gpus": 1} into `ray_actor_options`. JAXPAGE_CONFIG names a YAML
file. Set JAXPAGE_API_KEY if other machines can reach Ray's proxy.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve


def application() -> Any:
    """Loads the model in the replica's process, and returns the application."""
    from jaxpage.serving.asgi import asgi_app

    config = os.environ.get("JAXPAGE_CONFIG")
    # Without a key only requests to a name of this machine are answered, as by `jaxpage serve`. For
    # others set JAXPAGE_API_KEY.
    return asgi_app(config, engine={} if config else {"model": "demo", "num_blocks": 129})


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    # of a replica; the engine runs max_num_seqs of them, and the others wait in it
    max_ongoing_requests=64,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8},
    health_check_period_s=5,
)
@serve.ingress(application)
class Jaxpage:
    """The application that `jaxpage serve` has."""


app = Jaxpage.bind()
