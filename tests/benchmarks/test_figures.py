"""The arithmetic of figures: whoever reads a ratio relies on its being that of each round, and on its percentiles."""

import pytest

from benchmarks.figures import floor_all, paired_ratio, percentile, summarize


def test_percentiles_interpolate_between_the_nearest_values():
    values = [40.0, 10.0, 30.0, 20.0, 50.0]

    assert [percentile(values, percent) for percent in (0, 10, 50, 90, 100)] == pytest.approx(
        [10, 14, 30, 46, 50]
    )
    assert percentile([7.0], 90) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentiles_of_nothing_are_refused(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_the_medians():
    ours, theirs = [3.0, 1.0, 8.0], [1.0, 0.5, 4.0]

    ratio = paired_ratio(ours, theirs)

    assert ratio.median == 2.0
    assert summarize(ours).median / summarize(theirs).median == 3.0
    assert (ratio.p10, ratio.p90) == pytest.approx((2.0, 2.8))
    assert ratio.count == 3


def test_a_slow_spell_that_meets_both_sides_leaves_the_ratio_alone():
    quiet = paired_ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    spells = paired_ratio([2.0, 0.4, 0.2], [1.0, 0.2, 0.1])

    assert spells.median == quiet.median == 2.0


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([1.0], [-1.0])])
def test_ratios_need_as_many_of_each_and_a_positive_yardstick(ours, theirs):
    with pytest.raises(ValueError, match="no ratios"):
        paired_ratio(ours, theirs)


def test_losses_that_are_not_there_count_as_the_least_that_can_be_told():
    assert floor_all([-0.2, 0.0, 0.5], 0.001) == [0.001, 0.001, 0.5]
