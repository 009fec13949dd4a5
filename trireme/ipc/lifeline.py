"""What a child process sets up first: it ends with its parent and prints its stacks on a signal. Knows nothing of messages."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.5  # between two checks for the parent, where the kernel cannot watch it


def tie_to_parent(parent: int) -> None:
    """Makes this process end when its parent ends. On Linux the kernel does this even if this process hangs or is stopped.

    Call it only in processes that the parent's main thread started: the kernel acts when the starting thread ends.
    """
    if not _kernel_ties():
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the kernel was asked
        os._exit(0)


def _kernel_ties() -> bool:
    """Asks the kernel to kill this process when the thread that started it ends. Only Linux can do this."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    """Ends this process when its parent id changes, which means that the parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(0)


def prepare_child() -> None:
    """Ignores the signals that the supervisor handles for all processes. SIGUSR1 prints the stacks of all threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def show_stacks(pid: int) -> None:
    """Asks a process to print its stacks. A stopped process is continued for this time."""
    try:
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass
