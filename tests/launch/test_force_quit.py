"""Ctrl-C, twice, at a process whose main thread never comes back to Python."""

import signal
import subprocess
import sys

import psutil

from tests.serving.conftest import wait_for

PROGRAM = """
import os, signal, subprocess, sys, threading
from serve_app.launch.force_quit import at_once_on_second_interrupt, kill_descendants

def end():
    kill_descendants()
    os._exit(130)

signal.signal(signal.SIGINT, lambda *_: None)
with at_once_on_second_interrupt(end):
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # for ever
"""


def test_a_second_press_ends_it_with_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))

        def ended() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_for(ended, "it ends")
        assert process.returncode == 130
    assert psutil.wait_procs([child], timeout=10)[1] == []
