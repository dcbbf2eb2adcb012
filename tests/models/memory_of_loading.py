"""Prints the most host memory that loading and exporting a checkpoint take beside its shards: python memory_of_loading.py CHECKPOINT TYPE EXPORT"""

import gc
import json
import pathlib
import sys
import threading

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")

from jax.sharding import AxisType, Mesh  # noqa: E402

from areal_jax.models.checkpoint import load_policy  # noqa: E402
from areal_jax.models.config_json import read_model  # noqa: E402
from areal_jax.models.export import export_policy  # noqa: E402
from areal_jax.models.policy import param_shapes  # noqa: E402
from areal_jax.models.tokenizer import embedded_tokenizer  # noqa: E402


def resident():
    """Bytes, file-backed pages included."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The largest resident size while it is open, sampled every half millisecond."""

    def __enter__(self):
        gc.collect()
        self.before = self.peak = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.done.wait(0.0005):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, resident())


def main(checkpoint, param_dtype, export):
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    param_shapes(read_model(checkpoint))
    jax.block_until_ready(jax.device_put(np.zeros(4), jax.devices()[3]))
    with Peak() as loading:
        model, params = load_policy(checkpoint, param_dtype=param_dtype, mesh=mesh)
    shards = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    with Peak() as exporting:
        export_policy(export, model, params, embedded_tokenizer(), shard_bytes=100 << 20)
    print(
        json.dumps(
            {
                "shards": shards,
                "largest": largest,
                "loading": loading.peak - loading.before - shards,
                "exporting": exporting.peak - exporting.before,
            }
        )
    )


main(*sys.argv[1:])
