"""The first signal asks, the second ends, whatever the main thread does."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from areal_jax.cluster.signals import StopSignal


def start(body: str) -> subprocess.Popen:
    program = "import os, subprocess, sys, time\nfrom areal_jax.cluster.signals import StopSignal\n" + textwrap.dedent(body)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_lets_the_run_finish(number, code):
    process = start("""
        with StopSignal() as stop:
            print("ready", flush=True)
            assert stop.wait(30)
            time.sleep(.2)
            print("saved", stop.reason, flush=True)
        sys.exit(stop.exit_code)
    """)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert out.strip() == f"saved {number.name}"
    assert number.name in err and "once more" in err and "Traceback" not in err


def test_second_signal_ends_at_once_with_all_children():
    process = start("""
        child = subprocess.Popen([sys.executable, "-c",
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"])
        with StopSignal() as stop:
            time.sleep(1.0)
            print("ready", flush=True)
            stop.wait(30)
            time.sleep(60)
    """)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive and len(gone) == 2


def test_acts_while_the_main_thread_is_inside_c_code():
    """Locking a mutex twice never comes back to Python, as a long compilation does not; a Python handler alone would never run."""
    process = start("""
        import ctypes
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        with StopSignal() as stop:
            print("ready", flush=True)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
    """)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143


@pytest.fixture
def python_interrupts():
    """Python's own handler of SIGINT, also where the tests' parent ignores it (a shell's background job)."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("python_interrupts")
def test_handlers_are_restored_and_threads_gone():
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count())
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(3):
        with StopSignal() as stop:
            assert signal.getsignal(signal.SIGTERM) != before[1]
            assert not stop.requested and stop.exit_code == 0 and stop.reason == ""
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()) == before
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_signal_in_this_process_sets_the_flag_once():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        stop.request("another", 1)
        assert (stop.reason, stop.exit_code) == ("SIGTERM", 143)


def test_request_stops_without_a_signal():
    with StopSignal() as stop:
        stop.request("the disk is full", 1)
        assert stop.requested and (stop.reason, stop.exit_code) == ("the disk is full", 1)


def test_only_on_the_main_thread():
    caught = []

    def enter():
        try:
            StopSignal().__enter__()
        except ValueError as error:
            caught.append(error)

    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(caught) == 1
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
