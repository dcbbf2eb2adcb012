"""Ctrl-C and SIGTERM: the first asks the run to stop, the second ends it.

Invariants:
* The first signal changes nothing but ``requested``: the run finishes its step, saves and leaves with ``exit_code``.
* The second one ends the process at once, its child processes first, whatever the main thread does. A Python signal handler would wait for the main
  thread to come back from a compilation or a device; therefore the signal's number goes through ``signal.set_wakeup_fd`` to a thread that acts on it.
* Leaving the context restores the handlers that were there before.

    running ──1st signal: requested, reason, exit_code──► stopping ──loop ends──► saved, exit code 130 or 143
                                                             └──2nd signal──► children killed, exit at once
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import psutil

_CLOSE = b"\0"


class StopSignal:
    """Context manager around a run; enter it on the main thread.

    Args:
      signals: those that are taken over.
      promise: what is said at the first one.

    Attributes:
      reason: 'SIGINT', 'SIGTERM' or the text given to ``request``; empty until then.
      exit_code: 128 + the signal's number (130, 143); 0 until then.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM), promise: str = "stopping after this step with a checkpoint"):
        self._signals, self._promise = signals, promise
        self._event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self.reason = ""
        self.exit_code = 0

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until the run is asked to stop, ``timeout_s`` at most; returns ``requested``."""
        return self._event.wait(timeout_s)

    def request(self, reason: str, exit_code: int) -> None:
        """Asks the run to stop, as a first signal does; later calls change nothing."""
        if not self._event.is_set():
            self.reason, self.exit_code = reason, exit_code
            self._event.set()

    def __enter__(self) -> StopSignal:
        """Takes the signals over.

        Raises:
          ValueError: not on the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("StopSignal must be entered on the main thread: only there may a program set signal handlers")
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous = {number: signal.signal(number, _ignored) for number in self._signals}
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.write(self._write_end, _CLOSE)
        self._watcher.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        while True:
            received = os.read(self._read_end, 1)
            if received in (_CLOSE, b""):
                return
            if received[0] not in self._signals:
                continue
            number = signal.Signals(received[0])
            if self.requested:
                _say(f"{number.name} again: ending at once")
                end_process(128 + number)
            self.request(number.name, 128 + number)
            _say(f"{number.name}: {self._promise}; once more ends at once")


def _ignored(_number: int, _frame: Any) -> None:
    """Stands in for the default action; the watcher thread acts."""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be gone with whoever read it
        os.write(2, f"\n{text}\n".encode())


def end_process(exit_code: int) -> None:
    """Kills every child process, then this one, without any clean-up."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(exit_code)
