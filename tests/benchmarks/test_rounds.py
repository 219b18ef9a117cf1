"""How rounds are run: who comes when, under which names, and what is deleted when."""

from pathlib import Path

import pytest
import torch

from benchmarks.pages import Region
from benchmarks.raw import RawSetting, RawWriter
from benchmarks.rounds import Workplace, check_room, order_of_round, time_save, workplace


class Writer:
    def __init__(self, name, *, is_buffered):
        self.name, self.is_buffered, self.seen = name, is_buffered, []

    def describe(self):
        return {}

    def save(self, path):
        self.seen.append([other.name for other in path.parent.iterdir()])
        path.write_bytes(b"x")
        return path


def test_every_round_has_everyone_and_nobody_is_always_first():
    names = ["a", "b", "c", "d"]
    orders = [order_of_round(names, number) for number in range(8)]

    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    # Nobody always follows the same one, whose dirty work it would always pay for.
    followers = {(order[at], order[at + 1]) for order in orders for at in range(3)}
    assert {("a", "b"), ("b", "a")} <= followers


def test_names_are_never_used_twice(tmp_path):
    place = Workplace(tmp_path)

    assert len({place.fresh("x") for _ in range(100)}) == 100


def test_what_a_buffered_writer_wrote_stays_until_the_next_one_begins(tmp_path):
    place, buffered, direct = (
        Workplace(tmp_path),
        Writer("buffered", is_buffered=True),
        Writer("d", is_buffered=False),
    )

    for writer in (buffered, direct, direct, buffered):
        time_save(writer, place)

    assert direct.seen == [["buffered-00001"], ["buffered-00001"]]
    assert buffered.seen == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["buffered-00004"]


def test_paths_of_a_workplace_are_absolute_as_urls_and_other_processes_need_them(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with workplace(Path("new")) as place:
        assert place.fresh("x").is_absolute()


def test_a_workplace_leaves_nothing_behind(tmp_path):
    with workplace(tmp_path / "new") as place:
        place.fresh("x").mkdir()

    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("kind", ["memory", "storage"])
def test_a_size_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, kind):
    needs = {"memory_nbytes": 0, "storage_nbytes": 0, f"{kind}_nbytes": 2**60}

    with pytest.raises(SystemExit, match=f"GB of {kind}"):
        check_room(tmp_path, **needs)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_raw_writes_write_every_byte_once(tmp_path, threads):
    region = Region([torch.arange(4999, dtype=torch.int32), torch.arange(3)], huge=False)
    writer = RawWriter("raw", region, RawSetting(threads=threads, request_nbytes=8192))

    written = writer.save(tmp_path / "raw")

    content = written.read_bytes()
    assert content == region.view
    assert content[: 4 * 4999] == torch.arange(4999, dtype=torch.int32).numpy().tobytes()
    assert len(content) == 5 * 4096
    assert writer.describe()["threads"] == threads
