"""Groups: requests that share one prompt, which is computed once. Knows who computes it and what is leased; not the rows' order.

The first request to run is the leader and computes the prompt. The others start from a lease of its pages. The lease ends one token
before the prompt does: each request computes the last token itself, to get logits from which it can sample.
"""

from __future__ import annotations

from trireme.ipc.messages import NO_PARENT
from trireme.sched.memory import Found, Lease, Memory
from trireme.sched.request import NO_ROW, Task


class Group:
    """The requests of one prompt, until none of them waits for it any more."""

    __slots__ = ("has_begun", "leader", "lease", "num_waiting", "pauses")

    def __init__(self, size: int):
        self.num_waiting = size  # requests that have not had the prompt computed
        self.has_begun = False  # whether one of them has had a row
        self.leader: Task | None = None  # computes the prompt, or has done so
        self.lease: Lease | None = None
        self.pauses = 0  # how often the leader had been paused when it had computed the prompt

    @property
    def parent(self) -> int:
        """The row whose tables still hold the same prompt as the lease; NO_PARENT if there is no such row any more."""
        leader = self.leader
        return leader.row if leader is not None and leader.row != NO_ROW and leader.pauses == self.pauses else NO_PARENT

    @property
    def cached(self) -> int:
        """How many tokens of the prompt were in the prefix cache."""
        return max(self.leader.cached, 0) if self.leader is not None else 0


class Groups:
    """Which task is in which group. A task without a group computes its own prompt."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._of: dict[Task, Group] = {}
        self._leased: list[Group] = []

    def form(self, tasks: list[Task]) -> None:
        """Puts the tasks of one prompt into a group."""
        if len(tasks) > 1:
            self._of.update(dict.fromkeys(tasks, Group(len(tasks))))

    def of(self, task: Task) -> Group | None:
        return self._of.get(task)

    def may_go(self, task: Task) -> bool:
        """Whether the task can run now, without waiting for its leader."""
        group = self._of.get(task)
        return group is None or group.lease is not None or group.leader is None

    def found(self, task: Task) -> Found | None:
        """The lease of the prompt that the task's group has computed; None if there is none."""
        group = self._of.get(task)
        if group is None or group.lease is None:
            return None
        return self._memory.leased(group.lease)

    def seated(self, task: Task) -> None:
        """Notes that the task has a row and computes the prompt for its whole group: it becomes the leader."""
        group = self._of.get(task)
        if group is not None:
            group.leader, group.has_begun = task, True

    def has_begun(self, task: Task) -> bool:
        group = self._of.get(task)
        return group is not None and group.has_begun

    def unseated(self, task: Task) -> None:
        """Notes that the task has lost its row. A leader then leaves its group, because it may have tokens that the others lack."""
        group = self._of.get(task)
        if group is not None and group.leader is task:
            self.leave(task)

    def computed(self, task: Task) -> None:
        """Notes that the task has computed its prompt. What it has up to the last token is leased for the members of its group that
        still wait; if that cannot be, the next of them computes the prompt again."""
        group = self._of.get(task)
        if group is None:
            return
        if group.num_waiting > 1:
            group.lease, group.pauses = self._memory.lease(task.row, task.num_prompt - 1), task.pauses
            if group.lease is not None:
                self._leased.append(group)
        self.leave(task)

    def fork_at(self, task: Task) -> int:
        """Where others of its group will go on from what the task computes; 0 if there are none."""
        group = self._of.get(task)
        return task.num_prompt - 1 if group is not None and group.num_waiting > 1 else 0

    def leave(self, task: Task) -> None:
        """Notes that the task has its prompt or has ended, so that it no longer waits."""
        group = self._of.pop(task, None)
        if group is None:
            return
        group.num_waiting -= 1
        if group.lease is None and group.leader is task:
            group.leader = None
        if group.lease is not None and not group.num_waiting:
            self._memory.release(group.lease)
            self._leased.remove(group)

    def end_leases(self) -> None:
        """Ends all leases. The next task of each group then computes the prompt again."""
        for group in self._leased:
            assert group.lease is not None
            self._memory.release(group.lease)
            group.lease = group.leader = None
        self._leased = []
