"""Work ahead of whoever takes it: in order, and no further than was asked for."""

import threading

import pytest

from ckptfmt.read.streaming import WAITING, iter_ahead


@pytest.mark.parametrize("ahead_count", [None, 1, 5, 50])
@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_and_few_are_begun_before_they_are_taken(count, ahead_count):
    lock, begun = threading.Lock(), []

    def work(item):
        with lock:
            begun.append(item)
        return -item

    limit = WAITING * count if ahead_count is None else ahead_count
    taken = 0
    for result in iter_ahead(work, range(40), count=count, ahead_count=ahead_count):
        with lock:
            assert len(begun) <= taken + 1 + limit  # the one that is taken now, and those behind it
        assert result == -taken
        taken += 1
    assert taken == len(begun) == 40


def test_an_error_is_raised_when_its_turn_has_come():
    results = iter_ahead(lambda item: 1 // item, [1, 2, 0, 4], count=2)
    assert [next(results), next(results)] == [1, 0]
    with pytest.raises(ZeroDivisionError):
        next(results)
