"""The loop of docs/rl.md, killed at random moments: no prompt is lost, and none is used twice. REQ-PIP-003, REQ-PIP-004."""

from pathlib import Path

import pytest

from tests.data.rl_kills import judge, script_of_the_page, train


def written(folder: Path, text: str) -> Path:
    script = folder / "rl.py"
    script.write_text(text, "utf-8")
    return script


def check(folder: Path, count: int, kills: int) -> None:
    script = written(folder, script_of_the_page())
    assert train(script, folder / "run", count, kills=kills, seed=7, longest_s=0.1)
    found = judge(folder / "run", count)
    assert found["trained"] + found["discarded"] == count
    assert min(found.values())


def test_no_prompt_is_lost_or_repeated_by_kills(tmp_path: Path) -> None:
    check(tmp_path, 160, 10)


@pytest.mark.exhaustive
def test_no_prompt_is_lost_or_repeated_by_a_thousand_kills(tmp_path: Path) -> None:
    check(tmp_path, 24_000, 1000)


def test_a_loop_that_consumes_what_it_issues_loses_prompts(tmp_path: Path) -> None:
    """Negative control: prompts under way at a kill are missing at the end."""
    text = script_of_the_page()
    for old, new in (
        ("sampler.issue()  # after a resume, first the prompts that were under way",
         "sampler.issue()\n        sampler.consume([ticket])"),
        ("            sampler.consume([ticket for ticket, _ in batch])\n", ""),
        ("                    sampler.discard([ticket])\n", ""),
        ("answers.get(timeout=60)", "answers.get(timeout=2)"),
    ):  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = written(tmp_path, text)
    with pytest.raises(AssertionError):
        train(script, tmp_path / "run", 100, kills=2, seed=7)
