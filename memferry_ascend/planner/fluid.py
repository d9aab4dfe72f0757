"""Event core: servers that take ready tasks one at a time, and share bandwidth while they run.

A task needs one server, all of it, and optionally bytes/s of shared bandwidth. Running tasks that together
ask for more than there is are slowed max-min fairly (progressive filling): all rates rise together until a
bandwidth is used up, whoever uses it stops there, the rest go on. Between events rates are constant, so the
next event is known exactly; nothing is random and nothing is stepped.

Tasks form a template of one iteration; dependencies within it and on the iteration before let it repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

NO_DEMAND = (0.0, 0.0, 0.0)

Demand = tuple[float, float, float]  # bytes/s of (link down, link up, host memory) at full rate


@dataclass(frozen=True)
class Capacity:
    """Bytes/s of the link down, the link up, both together, and host memory."""

    h2d: float
    d2h: float
    duplex: float
    memory: float

    def clip(self, demand: Demand) -> Demand:
        """The demand, lowered so that a task alone runs at full rate: its time was measured alone."""
        down, up, memory = demand
        scale = 1.0
        for asked, given in (
            (down, self.h2d),
            (up, self.d2h),
            (down + up, self.duplex),
            (memory, self.memory),
        ):
            if asked * scale > given:
                scale = given / asked
        return (down * scale, up * scale, memory * scale)

    def share(self, demands: Sequence[Demand]) -> tuple[float, ...]:
        """The rate, 0 to 1, of each of the running tasks (progressive filling)."""
        rates = [1.0] * len(demands)
        open_tasks = [i for i, d in enumerate(demands) if d != NO_DEMAND]
        free = [self.h2d, self.d2h, self.duplex, self.memory]
        need = [(d[0], d[1], d[0] + d[1], d[2]) for d in demands]
        level = 0.0
        while open_tasks:
            step, tight = 1.0 - level, -1
            for resource in range(4):
                load = sum(need[i][resource] for i in open_tasks)
                if load > 0 and free[resource] / load < step:
                    step, tight = max(free[resource] / load, 0.0), resource
            level += step
            if tight < 0:
                break
            for resource in range(4):
                free[resource] -= step * sum(need[i][resource] for i in open_tasks)
            for i in [i for i in open_tasks if need[i][tight] > 0]:
                rates[i] = level
                open_tasks.remove(i)
        return tuple(rates)


@dataclass
class Template:
    """The tasks of one iteration, as parallel lists. `marker` is the task whose end ends the iteration."""

    servers: int
    server: list[int] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)
    rank: list[tuple[int, int]] = field(
        default_factory=list
    )  # (class, order): who goes first among the ready
    demand: list[int] = field(default_factory=list)
    label: list[tuple[str, int]] = field(default_factory=list)
    next: list[list[int]] = field(default_factory=list)  # released within the iteration
    next_iteration: list[list[int]] = field(default_factory=list)  # released in the next one
    waits: list[int] = field(default_factory=list)
    waits_before: list[int] = field(default_factory=list)  # waits on tasks of the iteration before
    demands: dict[Demand, int] = field(default_factory=lambda: {NO_DEMAND: 0})
    marker: int = -1

    def add(
        self,
        server: int,
        duration: float,
        rank: tuple[int, int],
        label: tuple[str, int],
        after: Iterable[int] = (),
        after_previous: Iterable[int] = (),
        demand: Demand = NO_DEMAND,
    ) -> int:
        """Add a task and return its number. server -1 = needs none (a barrier)."""
        task = len(self.server)
        self.server.append(server)
        self.duration.append(duration)
        self.rank.append(rank)
        self.label.append(label)
        self.demand.append(self.demands.setdefault(demand, len(self.demands)))
        self.next.append([])
        self.next_iteration.append([])
        self.waits.append(0)
        self.waits_before.append(0)
        for other in set(after):
            self.next[other].append(task)
            self.waits[task] += 1
        for other in set(after_previous):
            self.release_next(other, task)
        return task

    def release_next(self, task: int, later: int) -> None:
        """Let `later` wait, in every iteration but the first, for `task` of the iteration before."""
        self.next_iteration[task].append(later)
        self.waits_before[later] += 1


Occurrence = tuple[int, int]  # (iteration, task)


@dataclass
class Record:
    """When tasks ran: occurrence -> (start, end, cause); the cause ended last before it could start."""

    spans: dict[Occurrence, tuple[float, float, Occurrence | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Steady:
    """The steady state: seconds per iteration, and the window [start, end) of `cycle` iterations showing it.

    iterations: how many ran. converged: False when the schedule kept alternating and `period` is an average.
    """

    period: float
    start: float
    end: float
    cycle: int
    iterations: int
    converged: bool


def run(template: Template, capacity: Capacity, record: Record | None = None, most: int = 16) -> Steady:
    """Repeat the template until three periods in a row agree to 1e-9, or `most` iterations have run.

    When an iteration ends with nothing of the next one begun, the state is the initial one: what follows
    repeats what was seen, so with a barrier at its end one iteration is enough. A schedule that keeps
    alternating is averaged over the second half. Raises RuntimeError when tasks wait for each other.
    """
    return _Run(template, capacity, record, most).go()


class _Run:
    def __init__(self, template: Template, capacity: Capacity, record: Record | None, most: int) -> None:
        self.template, self.capacity, self.record, self.most = template, capacity, record, most
        self.waits_always = [a + b for a, b in zip(template.waits, template.waits_before, strict=True)]
        if 0 in self.waits_always:
            raise RuntimeError(
                "a task waits for nothing in any iteration, so iterations would run into each other"
            )
        self.waits: list[list[int]] = []
        self.started: list[int] = []
        self.finished: list[int] = []
        self.ready: list[list[tuple[int, int, int, int]]] = [[] for _ in range(template.servers)]
        self.running: list[Occurrence | None] = [None] * template.servers
        self.began = [0.0] * template.servers
        self.released: dict[Occurrence, tuple[float, Occurrence | None]] = {}
        self.ends: list[float] = []
        self.now = 0.0

    def go(self) -> Steady:
        self._open(self.template.waits)
        for task, count in enumerate(self.template.waits):
            if count == 0:
                self._release(0, task, None)
        self._loop()
        return self._steady()

    def _open(self, waits: Sequence[int]) -> None:
        self.waits.append(list(waits))
        self.started.append(0)
        self.finished.append(0)

    def _release(self, iteration: int, task: int, cause: Occurrence | None) -> None:
        place = self.template.server[task]
        if place < 0:
            self._finish(iteration, task, cause)
            return
        if self.record is not None:
            self.released[iteration, task] = (self.now, cause)
        cls, order = self.template.rank[task]
        heappush(self.ready[place], (cls, iteration, order, task))

    def _finish(self, iteration: int, task: int, cause: Occurrence | None) -> None:
        """Let go of what waited for this task; `cause` is it, or for a barrier the task that passed it."""
        self.finished[iteration] += 1
        here = self.waits[iteration]
        for later in self.template.next[task]:
            here[later] -= 1
            if here[later] == 0:
                self._release(iteration, later, cause)
        following = iteration + 1
        if len(self.waits) == following:
            self._open(self.waits_always)
        there = self.waits[following]
        for later in self.template.next_iteration[task]:
            there[later] -= 1
            if there[later] == 0:
                self._release(following, later, cause)
        if task == self.template.marker:
            self.ends.append(self.now)

    def _loop(self) -> None:
        """Start what can start, go to the next end, until the steady state is known."""
        template, ready, running, record = self.template, self.ready, self.running, self.record
        duration, demand, servers = template.duration, template.demand, range(template.servers)
        by_number = sorted(template.demands, key=template.demands.__getitem__)
        rates_of: dict[tuple[int, ...], tuple[float, ...]] = {}
        left, slack, asks = [0.0] * template.servers, [0.0] * template.servers, [0] * template.servers
        last_on: list[Occurrence | None] = [None] * template.servers
        seen = 0
        while True:
            if len(self.ends) > seen:
                seen = len(self.ends)
                if self._renewed() or self._settled() or seen == self.most:
                    return
            for s in servers:
                if running[s] is None and ready[s]:
                    _, iteration, _, task = heappop(ready[s])
                    running[s] = (iteration, task)
                    left[s] = duration[task]
                    slack[s] = 1e-12 * duration[task]
                    asks[s] = demand[task]
                    self.began[s] = self.now
                    self.started[iteration] += 1
                    if record is not None and self.released[iteration, task][0] < self.now:
                        self.released[iteration, task] = (self.now, last_on[s])  # it waited for the server
            key = tuple(asks)
            rates = rates_of.get(key)
            if rates is None:
                rates = rates_of[key] = self.capacity.share([by_number[d] for d in key])
            step = math.inf
            for s in servers:
                if running[s] is not None and left[s] < step * rates[s]:
                    step = left[s] / rates[s]
            if step == math.inf:
                raise RuntimeError("the iteration cannot end: tasks wait for each other")
            self.now += step
            done: list[Occurrence] = []
            for s in servers:
                who = running[s]
                if who is None:
                    continue
                left[s] -= step * rates[s]
                if left[s] <= slack[s]:
                    done.append(who)
                    last_on[s] = who
                    running[s] = None
                    asks[s] = 0
                    if record is not None:
                        record.spans[who] = (self.began[s], self.now, self.released[who][1])
            for iteration, task in done:
                self._finish(iteration, task, (iteration, task))

    def _renewed(self) -> bool:
        """The iteration just ended left nothing behind and nothing of the next has begun."""
        last = len(self.ends) - 1
        return self.finished[last] == len(self.template.server) and self.started[last + 1] == 0

    def _settled(self) -> bool:
        if len(self.ends) < 4:
            return False
        last = self.ends[-1] - self.ends[-2]
        return all(abs(self.ends[-i] - self.ends[-i - 1] - last) <= 1e-9 * last for i in (2, 3))

    def _steady(self) -> Steady:
        ends, seen = self.ends, len(self.ends)
        if self.record is not None:
            for s, who in enumerate(self.running):
                if who is not None:  # cut off at the end of the window
                    self.record.spans[who] = (self.began[s], self.now, self.released[who][1])
        if self._renewed():
            return Steady(ends[-1] / seen, 0.0, self.now, seen, seen, True)
        if self._settled():
            return Steady(ends[-1] - ends[-2], ends[-2], self.now, 1, seen, True)
        cycle = seen - seen // 2
        start = ends[-1 - cycle]
        return Steady((ends[-1] - start) / cycle, start, self.now, cycle, seen, False)
