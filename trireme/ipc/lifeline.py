"""What a child process does first: never outlive its parent, show its stacks when asked. Knows Linux, nothing of messages."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, even if this process hangs or is stopped by then.

    Only processes started by a parent's main thread may tie themselves: other threads end before their process does.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux: the closed channel tells, only later
    if os.getppid() != parent:  # it ended before the kernel was told
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
