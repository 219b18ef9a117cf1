"""Mixed failures: their times and kinds, and the account of a training's gaps."""

import collections
import itertools
import random

from benchmarks.failures import KINDS, Event, Stop, draw_events, find_stops, sum_by_kind

STEP_S = 0.1


def test_a_failure_for_each_period_and_each_kind_equally_often() -> None:
    events = draw_events(3600.0, random.Random(37))
    assert collections.Counter(event.kind for event in events) == dict.fromkeys(KINDS, 8)
    gaps_s = [later.at_s - one.at_s for one, later in itertools.pairwise(events)]
    assert min(gaps_s) > 15.0
    assert events[-1].at_s < 3600.0 - 10.0
    assert events == draw_events(3600.0, random.Random(37))


def test_a_gap_without_a_lost_step_is_a_slow_step() -> None:
    steps = [(0.1, 0), (0.2, 1), (3.0, 2), (3.1, 3)]
    assert find_stops(steps, STEP_S) == []


def test_a_stop_belongs_to_the_last_failure_before() -> None:
    struck = [(10.0, Event(10.0, "rank killed", 0)), (50.0, Event(50.0, "NaN batch", 1))]
    # The last step before a failure may have ended a moment earlier.
    stops = [Stop(9.95, 4.0, 30), Stop(49.9, 1.0, 2), Stop(60.0, 1.0, 3)]
    table = sum_by_kind(stops, struck)
    assert table == {
        "rank killed": {"count": 1, "stops": 1, "stopped_s": 4.0, "redone_s": 3.0},
        "NaN batch": {"count": 1, "stops": 2, "stopped_s": 2.0, "redone_s": 0.5},
    }
