"""Two processes of jax.distributed with two devices each save arrays of all four, and load them cut in another way.

Usage: jax_processes.py CHECKPOINT
"""

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptfmt

rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", count, rank)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
whole = np.arange(64, dtype=np.float32).reshape(8, 8)


def make(spec, content):
    """Return an array of the mesh's devices, of which each process has its shards."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(content.shape, sharding, lambda index: content[index])


def state_of(specs, content) -> Any:
    """Return a state of two arrays; its key is the same on both processes."""
    weights = {"layer": {name: make(spec, content) for name, spec in specs.items()}}
    return ckptfmt.State(weights=weights, extra={"key": jax.random.key(int(content[0, 1]))})


ckptfmt.save(
    sys.argv[1], state_of({"cut": P("a", "b"), "copied": P(None, "b")}, whole), step=1, agree="save"
)
state = state_of({"cut": P(None, "a"), "copied": P()}, np.zeros_like(whole))
report: Any = ckptfmt.load(sys.argv[1], state, agree="load")
for array in state.weights["layer"].values():
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), whole[shard.index]), (rank, shard)
assert jax.random.key_data(state.extra["key"]).tolist() == [0, 1]
sys.stdout.write(f"{report.reads.needed_nbytes}\n")
