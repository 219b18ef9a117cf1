"""Seconds lost, on made-up rounds: what is subtracted from what, and which ratio comes out."""

import pytest

from benchmarks.account import sum_up_account
from benchmarks.lost import sum_up_lost


def make_round(without_s, *, copy_s=0.1, blocked_s=0.002, **wall_s):
    return {
        "without_s": without_s,
        "copy_s": copy_s,
        "runs": {
            name: {"wall_s": seconds, "call_s": 0.1, "blocked_s": blocked_s, "is_done": True}
            for name, seconds in wall_s.items()
        },
    }


def test_what_is_lost_is_measured_against_the_mean_of_the_same_round():
    rows = [
        make_round(
            [4.0, 4.2], ckptfmt=4.4, ckptfmt_copy=4.5, floor=4.3, dcp_thread=5.6, dcp_process=6.1
        ),
        make_round(
            [8.0, 8.0],
            ckptfmt=8.3,
            ckptfmt_copy=8.6,
            floor=8.1,
            dcp_thread=9.0,
            dcp_process=11.0,
            blocked_s=0.004,
        ),
    ]

    figures, ratios = sum_up_lost(rows)

    assert figures["lost_ckptfmt_s"].median == pytest.approx(0.3)
    assert figures["lost_dcp_thread_s"].median == pytest.approx((1.5 + 1.0) / 2)
    assert ratios["lost_vs_floor"].median == pytest.approx((0.3 / 0.2 + 0.3 / 0.1) / 2)
    assert ratios["lost_vs_dcp_thread"].median == pytest.approx((0.3 / 1.5 + 0.3 / 1.0) / 2)
    assert ratios["lost_vs_dcp_process"].median == pytest.approx((0.3 / 2.0 + 0.3 / 3.0) / 2)
    assert ratios["overlap_lost_vs_not"].median == pytest.approx((0.3 / 0.4 + 0.3 / 0.6) / 2)
    assert ratios["overlap_blocked_vs_copy"].median == pytest.approx(0.03)


def test_a_round_that_gained_time_has_a_ratio_all_the_same():
    _, ratios = sum_up_lost(
        [
            make_round(
                [4.0], ckptfmt=3.9, ckptfmt_copy=4.1, floor=3.9, dcp_thread=4.5, dcp_process=3.8
            )
        ]
    )

    assert ratios["lost_vs_dcp_thread"].median == pytest.approx(0.001 / 0.5)
    assert ratios["lost_vs_dcp_process"].median == 1.0


def test_the_account_of_a_save_is_all_its_threads_and_processes_beside_the_floor():
    rows = [
        {
            "ckptfmt": {"trainer/MainThread": 0.1, "saver/ended": 0.5},
            "floor": {"copy": 0.1, "digest": 0.3, "write": 0.1},
        },
        {
            "ckptfmt": {"trainer/MainThread": 0.3, "saver/ended": 0.5},
            "floor": {"copy": 0.1, "digest": 0.2, "write": 0.1},
        },
    ]

    figures, ratios = sum_up_account(rows)

    assert figures["cpu_ckptfmt_trainer/MainThread_s"].median == pytest.approx(0.2)
    assert figures["cpu_floor_s"].median == pytest.approx(0.45)
    assert ratios["cpu_vs_floor"].median == pytest.approx((0.6 / 0.5 + 0.8 / 0.4) / 2)
