"""What runs inside a process of the reward service.

Invariants:
* A worker never outlives the program that started it: it ends within a second of the parent, and at the latest with the
  kernel's own timer of the check it is in (which also ends a check that holds the interpreter's lock).
* What a verifier prints goes nowhere; what it raises travels back as text with its traceback.
* What goes back is small: names and finite numbers.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

MAX_COMPONENTS = 64
COMPONENT_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,80}")
RESERVED_NAMES = ("mean", "std", "correct_fraction", "zero_std_groups", "latency_p50_s", "latency_p99_s", "timeouts", "errors")
"""Names under ``reward/`` in metrics.jsonl that are not components."""
MAX_CAUSE_CHARACTERS = 4_000

_verifier: Callable[..., Mapping[str, float]] | None = None
_load_error = ""


class VerifierError(RuntimeError):
    """The verifier raised, or what it returned is no reward.

    Attributes:
      cause: its traceback.
      seconds: until then.
    """

    def __init__(self, cause: str, seconds: float):
        super().__init__(cause, seconds)
        self.cause, self.seconds = cause, seconds


def load(dotted: str) -> Callable[..., Mapping[str, float]]:
    """The function named by 'package.module:function'.

    Raises:
      ValueError: the name is malformed or names nothing that can be called.
      ImportError: the module cannot be imported.
    """
    module, colon, name = dotted.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"the verifier must be named as package.module:function; got '{dotted}'")
    function: Any = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"the module '{module}' must define the function '{name}'; got {function!r}")
    return cast("Callable[..., Mapping[str, float]]", function)


def start(dotted: str, memory_bytes: int | None) -> None:
    """Prepares the process: once, before its first check.

    Args:
      dotted: the verifier's name.
      memory_bytes: how much its data may grow beyond what the imports took; None: unlimited.
    """
    global _verifier, _load_error
    # Own process group: a Ctrl-C or kill of the program's group is the program's to answer. An ordinary SIGTERM ends the
    # process at once, even inside C code, where a Python handler would wait.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    try:
        _verifier = load(dotted)
    except (Exception, SystemExit):
        # Another's module may raise anything, or exit. Kept, and told by warm_up and by each check: a process that dies here would only be started again.
        _load_error = _traceback()
    if memory_bytes is not None:
        _limit_memory(memory_bytes)


def ready(pause_s: float) -> tuple[int, str]:
    """(process id, why the verifier could not be loaded or ''), after a pause that leaves the next call to another worker."""
    time.sleep(pause_s)
    return os.getpid(), _load_error


def check(response: str, answer: str, metadata: Mapping[str, Any], timeout_s: float) -> tuple[dict[str, float], float]:
    """One check.

    Returns:
      The components and the seconds it took.

    Raises:
      VerifierError: with the traceback as text.
    """
    if _verifier is None:
        raise VerifierError(_load_error, 0.0)
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, timeout_s + 1.0)
    try:
        components = _checked(_verifier(response, answer, metadata))
    except BaseException:  # SystemExit and KeyboardInterrupt of a verifier are its failures, not the worker's
        raise VerifierError(_traceback(), time.monotonic() - began) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return components, time.monotonic() - began


def _checked(components: Any) -> dict[str, float]:
    if not isinstance(components, Mapping) or "correct" not in components:
        raise ValueError(f"a verifier must return a mapping with 'correct'; got {type(components).__name__}")
    if len(components) > MAX_COMPONENTS:
        raise ValueError(f"a verifier must return at most {MAX_COMPONENTS} components; got {len(components)}")
    result = {}
    for name, value in components.items():
        number = float(value)
        if not isinstance(name, str) or not COMPONENT_NAME.fullmatch(name) or name in RESERVED_NAMES or not math.isfinite(number):
            raise ValueError(
                f"a component must be a finite number under a name of up to 80 letters, digits, '_', '.' or '-', none of {', '.join(RESERVED_NAMES)}; "
                f"got {str(name)[:80]!r}: {number}"
            )
        result[name] = number
    return result


def _traceback() -> str:
    text = traceback.format_exc(limit=-8)
    return text if len(text) <= MAX_CAUSE_CHARACTERS else "…" + text[-MAX_CAUSE_CHARACTERS:]


def _limit_memory(growth: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/status") as stream:
        kilobytes = next(int(line.split()[1]) for line in stream if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = kilobytes * 1024 + growth
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
