"""A healer decides as the cause demands: killed, poisoned and buggy runs, played by real processes."""

from __future__ import annotations

import collections
import os
from pathlib import Path

import pytest

from tests.loop.healer_scenes import (
    CAUSES,
    CONTROLS,
    Case,
    HealerName,
    Result,
    complaints_of_all,
    expected,
    make_case,
    play_all,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

#: Seeds of the sample: two cases of each cause, with one and with two processes.
SEEDS = (0, 7, 1, 113, 2, 16, 3, 10, 32, 11, 5, 47, 6, 27)
#: A case for each control: the control decides wrongly.
CONVICTING: dict[HealerName, int] = {
    "without witness": 3,
    "always retries": 3,
    "always skips": 5,
}
#: Number of cases of the requirement, and the smallest share of cases decided as demanded.
CASES, SHARE = 200, 0.95


def _play(jobs: list[tuple[Case, HealerName]], directory: Path) -> list[Result]:
    return play_all(jobs, directory, players=min(2, os.cpu_count() or 1))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[HealerName, int], Result]:
    names: list[tuple[HealerName, int]] = [("healer", seed) for seed in SEEDS]
    names.extend(CONVICTING.items())
    jobs = [(make_case(seed), healer) for healer, seed in names]
    results = _play(jobs, tmp_path_factory.mktemp("lives"))
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_case_is_decided_as_its_cause_demands(
    seed: int, played: dict[tuple[HealerName, int], Result]
) -> None:
    case = make_case(seed)
    result = played["healer", seed]
    assert expected(case).complaints(result) == [], (case.describe(), result)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_decides_wrongly(
    control: HealerName, played: dict[tuple[HealerName, int], Result]
) -> None:
    case = make_case(CONVICTING[control])
    result = played[control, case.seed]
    assert expected(case).complaints(result), case.describe()
    if control == "without witness":
        assert result.choices == ("retry", "retry", "stop")
    elif control == "always retries":
        assert result.is_loop
        assert set(result.choices) == {"retry"}
    else:
        assert set(result.choices) == {"skip"}
        assert result.skips


def test_the_cases_are_the_same_in_each_run_and_cover_each_cause() -> None:
    cases = [make_case(seed) for seed in range(CASES)]
    assert cases == [make_case(seed) for seed in range(CASES)]
    counts = collections.Counter(case.cause for case in cases)
    assert counts.keys() == set(CAUSES)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {case.world for case in cases} == {1, 2}
    assert all(case.rank is None or case.rank < case.world for case in cases)
    assert all(1 <= case.step <= case.steps for case in cases)


@pytest.mark.exhaustive
def test_all_cases(tmp_path: Path) -> None:
    cases = [make_case(seed) for seed in range(CASES)]
    results = _play([(case, "healer") for case in cases], tmp_path)
    wrong = {
        case.describe(): complaints
        for case, result in zip(cases, results, strict=True)
        if (complaints := expected(case).complaints(result))
    }
    assert len(wrong) <= (1 - SHARE) * CASES, wrong
    of_all = [complaints_of_all(result) for result in results]
    assert not any(of_all), wrong
