"""The event core: sharing by hand, order among the ready, steady states."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_ascend.planner.fluid import Capacity, Record, Template, run

LINK = Capacity(h2d=10.0, d2h=10.0, duplex=16.0, memory=30.0)
AMPLE = Capacity(*[math.inf] * 4)


def test_what_fits_runs_at_full_rate():
    assert LINK.share([(10.0, 0.0, 10.0), (0.0, 6.0, 6.0), (0.0, 0.0, 0.0)]) == (1.0, 1.0, 1.0)


def test_two_readers_of_one_direction_are_slowed_alike():
    assert LINK.share([(10.0, 0.0, 0.0), (10.0, 0.0, 0.0), (0.0, 3.0, 0.0)]) == pytest.approx((0.5, 0.5, 1.0))


def test_both_directions_share_the_duplex_bandwidth():
    assert LINK.share([(10.0, 0.0, 0.0), (0.0, 10.0, 0.0)]) == pytest.approx((0.8, 0.8))


def test_who_does_not_use_the_tight_resource_goes_on():
    rates = LINK.share([(10.0, 0.0, 10.0), (10.0, 0.0, 10.0), (0.0, 0.0, 20.0)])
    assert rates == pytest.approx((0.5, 0.5, 1.0))
    rates = Capacity(10.0, 10.0, 20.0, 15.0).share([(10.0, 0.0, 10.0), (0.0, 0.0, 20.0)])
    assert rates == pytest.approx((0.5, 0.5))


rates = st.floats(0, 100)


@given(st.lists(st.tuples(rates, rates, rates), min_size=1, max_size=4))
def test_sharing_wastes_nothing_and_exceeds_nothing(demands):
    demands = [LINK.clip(d) for d in demands]
    found = LINK.share(demands)
    limits = (LINK.h2d, LINK.d2h, LINK.duplex, LINK.memory)
    used = [
        sum(rate * need for rate, need in zip(found, column, strict=True))
        for column in (*zip(*demands, strict=True), [d[0] + d[1] for d in demands])
    ]
    used = [used[0], used[1], used[3], used[2]]
    assert all(u <= limit * (1 + 1e-9) for u, limit in zip(used, limits, strict=True))
    for rate, (down, up, memory) in zip(found, demands, strict=True):
        assert 0 <= rate <= 1
        if rate < 1 - 1e-9:  # a slowed task uses something that is used up
            mine = (down, up, down + up, memory)
            pairs = zip(mine, used, limits, strict=True)
            assert any(need > 0 and u >= limit * (1 - 1e-6) for need, u, limit in pairs)


def test_a_task_alone_is_never_slowed():
    assert LINK.share([LINK.clip((50.0, 50.0, 500.0))]) == pytest.approx((1.0,))


def repeat(template: Template) -> None:
    """Let every task wait for the marker of the iteration before."""
    template.marker = template.add(-1, 0.0, (0, 0), ("end", -1), after=range(len(template.server)))
    for task in range(template.marker):
        template.release_next(template.marker, task)


def test_the_lower_class_and_then_the_lower_order_goes_first():
    template = Template(servers=1)
    for number, rank in enumerate([(1, 0), (0, 5), (0, 1)]):
        template.add(0, 1.0, rank, ("task", number))
    repeat(template)
    record = Record()
    steady = run(template, AMPLE, record)
    assert [record.spans[0, task][0] for task in range(3)] == [2.0, 1.0, 0.0]
    assert (steady.period, steady.iterations, steady.converged) == (3.0, 1, True)


def test_a_running_task_speeds_up_when_the_other_ends():
    template = Template(servers=2)
    template.add(0, 4.0, (0, 0), ("long", 0), demand=(10.0, 0.0, 0.0))
    template.add(1, 1.0, (0, 0), ("short", 1), demand=(10.0, 0.0, 0.0))
    repeat(template)
    record = Record()
    assert run(template, LINK, record).period == pytest.approx(5.0)  # half speed for 2 s, then alone for 3
    assert record.spans[0, 1][1] == pytest.approx(2.0)


def test_iterations_that_overlap_settle_on_the_slowest_resource():
    template = Template(servers=2)
    first = template.add(0, 3.0, (0, 0), ("first", 0))
    second = template.add(1, 2.0, (0, 0), ("second", 0), after=[first])
    template.marker = second
    template.release_next(first, first)
    steady = run(template, AMPLE)
    assert steady.period == pytest.approx(3.0)
    assert steady.converged


def test_tasks_that_wait_for_each_other_are_an_error():
    template = Template(servers=1)
    a = template.add(0, 1.0, (0, 0), ("a", 0))
    b = template.add(0, 1.0, (0, 1), ("b", 0), after=[a])
    template.next[b].append(a)
    template.waits[a] += 1
    template.marker = b
    with pytest.raises(RuntimeError, match="wait for each other"):
        run(template, AMPLE)


def test_a_task_free_in_every_iteration_is_an_error():
    template = Template(servers=1)
    template.marker = template.add(0, 1.0, (0, 0), ("a", 0))
    with pytest.raises(RuntimeError, match="waits for nothing"):
        run(template, AMPLE)
