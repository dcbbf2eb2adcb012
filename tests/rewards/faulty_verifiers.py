"""Verifiers that misbehave on command, for the tests of the reward service: the response names what to do."""

import os
import signal
import sys
import time


def act(response, answer, metadata):
    name, _, argument = response.partition(" ")
    if name == "ok":
        return {"correct": 1.0}
    if name == "wrong":
        return {"correct": 0.0, "format": 1.0}
    if name == "sleep":
        time.sleep(float(argument))
        return {"correct": 1.0}
    if name == "raise":
        raise ValueError(f"cannot judge {argument}")
    if name == "raise_long":
        raise ValueError("x" * 50_000_000)
    if name == "interrupt":
        raise KeyboardInterrupt
    if name == "hang":
        while True:
            pass
    if name == "hang_locked":  # one long operation of the interpreter: no Python handler or thread runs meanwhile
        return {"correct": float(9 ** (9**9) > 0)}
    if name == "hang_ignoring":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if name == "exit":
        os._exit(int(argument))
    if name == "sys_exit":
        sys.exit(0)
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(10)
    if name == "memory":
        return {"correct": float(len(bytearray(8 << 30)))}
    if name == "print":
        for _ in range(1000):
            print("x" * 10_000)
            print("x" * 10_000, file=sys.stderr)
        return {"correct": 1.0}
    if name == "return_many":
        return {"correct": 1.0, **{f"c{i}": 1.0 for i in range(10_000)}}
    if name == "return_none":
        return None
    if name == "return_nan":
        return {"correct": float("nan")}
    if name == "return_text":
        return {"correct": "yes"}
    if name == "process":
        return {"correct": 1.0, "pid": float(os.getpid()), "group": float(os.getpgid(0))}
    raise AssertionError(f"unknown command {response[:80]!r}")
