"""One of two processes that load a checkpoint onto a mesh of both: python process_of_loading.py PROCESS PORT CHECKPOINT; prints what it read."""

import json
import math
import os
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from areal_jax.models.checkpoint import load_policy


def main(process, port, checkpoint):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    read = []
    original = os.preadv

    def counted(*arguments):
        read.append(original(*arguments))
        return read[-1]

    os.preadv = counted
    mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    leaves = jax.tree.leaves(load_policy(checkpoint, mesh=mesh)[1])
    shards = [{str(shard.index): math.prod(shard.data.shape) * 4 for shard in leaf.addressable_shards} for leaf in leaves]
    print(json.dumps({"read": sum(read), "shards": sum(sum(sizes.values()) for sizes in shards), "whole": sum(leaf.nbytes for leaf in leaves)}))


main(*sys.argv[1:])
