"""A process that checkpoints until it is killed; ``test_checkpoint.py`` runs it.

JAX is imported once and each life is a fork, made before any device exists. A life restores the newest checkpoint, says which
('r STEP OK'), then saves step after step and says which are whole ('s STEP begins', 'w STEP'). The parent kills it at the moment it is told.

Arguments: directory, then the delays in seconds after the first 's'. The parent prints one JSON line with what it saw.
"""

import json
import os
import select
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.trainer.checkpoint import Checkpointer

SHAPES = {"a": (256, 1024), "b": (1024, 256), "c": (7,), "d": ()}


def life(directory: str, out: int) -> None:
    """Never returns."""

    def say(text: str) -> None:
        os.write(out, f"{text}\n".encode())

    device = SingleDeviceSharding(jax.devices()[0])
    checkpointer = Checkpointer(directory, keep=1)
    step = checkpointer.latest()
    if step is not None:
        abstract = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=device) for name, shape in SHAPES.items()}
        state, meta = checkpointer.restore(step, abstract)
        whole = all((np.asarray(leaf) == step).all() for leaf in state.values()) and meta == {"step": step, "again": [step] * 1000}
        say(f"r {step} {'OK' if whole else 'TORN'}")
    else:
        step = 0
        say("r 0 OK")
    while True:
        step += 1
        state = {name: jax.device_put(np.full(shape, step, np.float32), device) for name, shape in SHAPES.items()}
        say(f"s {step}")
        checkpointer.save(step, state, {"step": step, "again": [step] * 1000})
        checkpointer.wait()
        say(f"w {step}")


def watch(directory: str, delay: float) -> dict:
    """One life and its end."""
    inlet, outlet = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inlet)
        try:
            life(directory, outlet)
        finally:
            os._exit(1)
    os.close(outlet)
    text, end = b"", None
    while True:
        ready, _, _ = select.select([inlet], [], [], 60 if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            break
        part = os.read(inlet, 65536)
        if not part:
            break
        text += part
        if end is None and b"\ns " in text:
            end = time.monotonic() + delay
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(inlet, 65536):
        text += part
    os.close(inlet)
    lines = [line.split() for line in text.decode().splitlines()]
    return {
        "restored": next(([int(line[1]), line[2]] for line in lines if line[0] == "r"), None),
        "whole": max((int(line[1]) for line in lines if line[0] == "w"), default=None),
        "begun": max((int(line[1]) for line in lines if line[0] == "s"), default=None),
        "half_written": [name for name in os.listdir(directory) if "tmp" in name],
    }


if __name__ == "__main__":
    print(json.dumps([watch(sys.argv[1], float(delay)) for delay in sys.argv[2:]]))
