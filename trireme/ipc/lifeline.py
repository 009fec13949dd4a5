"""What a child process does first: never outlive its parent, show its stacks when asked. Knows processes, nothing of messages."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.5  # between two looks for the parent, where the kernel does not tell


def tie_to_parent(parent: int) -> None:
    """This process ends when the one that started it does, even if it hangs or is stopped by then, where the kernel sees to it.

    Only processes started by a parent's main thread may tie themselves: other threads end before their process does.
    """
    if not _kernel_ties():
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(0)


def _kernel_ties() -> bool:
    """Asks the kernel to kill this process when the thread that started it ends: Linux alone can."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    """Whoever loses its parent gets another one."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(0)


def prepare_child() -> None:
    """Signals meant for the whole tree are the supervisor's to answer; SIGUSR1 prints the stacks of all threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def show_stacks(pid: int) -> None:
    """Asks a process for its stacks; one that was stopped is let go on for as long as that takes."""
    try:
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass
