"""A new program counts once, a reused one not at all."""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.telemetry.compiles import CompileCounter


def test_counts_programs_not_calls():
    three, five = (jax.device_put(np.ones(n, np.float32)) for n in (3, 5))
    counter = CompileCounter()

    @jax.jit
    def doubled(x):
        return x * 2

    for _ in range(3):
        doubled(three)
    assert counter.count == 1 and counter.steady_state == 0 and counter.seconds > 0
    counter.mark_steady()
    doubled(three)
    assert counter.steady_state == 0 and counter.recent == []
    doubled(five)
    assert counter.metrics() == {"compile/count": 2, "compile/steady_state": 1}
    assert "doubled" in counter.recent[0]
    counter.close()
    doubled(jnp.ones(7))
    assert counter.count == 2


def test_counts_other_threads_and_ahead_of_time():
    counter = CompileCounter()
    lowered = jax.jit(lambda x: jnp.sin(x) - 1).lower(jax.ShapeDtypeStruct((11,), jnp.float32))
    thread = threading.Thread(target=lowered.compile)
    thread.start()
    thread.join()
    assert counter.count == 1
    counter.close()
