"""Shards models over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.sharding.dividing import (
        LOGICAL_SHARDS,  # is the number of parts where sums do not depend on the devices
        Place,  # is one of the parameters that have parts of a weight
        ShardedWeight,  # is a weight with these parameters
        ShardingChecker,  # checks shardings of a model
        entry_at,  # gives the entry of a tree
        join_weights,  # makes whole weights of parts
        kv_of_shard,  # gives what a shard keeps
        make_sharding,  # decides how a model is sharded
        shard_weights,  # finds the parameters that have parts of weights
        with_sharding,  # gives the rule that shards the layers
    )

__getattr__, __dir__ = open_door(__name__)
