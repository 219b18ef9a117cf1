"""What a fuzzer guided by coverage has found to reach each line of the readers: played again, without the fuzzer."""

import pytest

from tests.builders import error_of
from tests.fuzz.targets import TARGETS, feed, feed_tree, list_kept, seeds


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_are_accepted_as_they_are_or_refused_by_name(target):
    kept = list_kept(target)
    assert len(kept) > 10
    for content in kept:
        feed(target, content)


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_fuzzer_begins_with_is_accepted(target):
    assert all(feed(target, content) for content in seeds(target))


@pytest.mark.parametrize("target", TARGETS)
def test_only_an_error_of_the_format_is_a_refusal(target, monkeypatch):
    def refuse(_):
        raise error

    monkeypatch.setitem(TARGETS, target, refuse)
    error = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        feed(target, b"")
    error = error_of(lambda: feed_tree(b""))
    assert not feed(target, b"")
