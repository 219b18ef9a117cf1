"""The language: docstrings and comments name things, and no file that does falls back."""

import pytest

from tests.house.language import HEADLESS_BOUND, PRONOUN_BOUND, Count, list_paths, read_list
from tests.house.sources import ROOT

PATHS = list_paths()
KNOWN = read_list()


@pytest.mark.parametrize("path", PATHS)
def test_docstrings_name_what_they_mean(path):
    """If a number rose: rewrite the sentences, by STYLE. If all sank: ``python -m tests.house.language``."""
    bounds = KNOWN.get(path, (HEADLESS_BOUND, PRONOUN_BOUND, 0))
    count = Count.of((ROOT / path).read_text("utf-8"))
    assert not count.is_above(bounds), (count, count.rates, bounds)


def test_every_listed_file_is_there():
    assert set(KNOWN) <= set(PATHS)


RIDDLE = (
    '"""Tell what who reads it has of those.\n\nArgs:\n    origin: of the attempt.\n"""\n# what'
    " comes\n"
) * 1


def test_riddles_are_counted():
    found = Count.of(RIDDLE)
    assert (found.headless, found.pronouns, found.dangling) == (3, 2, 1)
    assert found.is_above((HEADLESS_BOUND, PRONOUN_BOUND, 0))
    assert not Count.of(
        '"""Return the sum.\n\nArgs:\n    count: the number of terms; it is positive.\n"""\n'
    ).is_above((HEADLESS_BOUND, PRONOUN_BOUND, 0))
