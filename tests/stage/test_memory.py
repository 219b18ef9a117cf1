"""How much memory there is, on machines and in containers of every make; how many slots that gives."""

import os
import pathlib
import re
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.write.slot import available_nbytes, margin_nbytes, plan_slots, slot_nbytes
from tests.house.sources import ROOT
from tests.store.helpers import FAST_DIRECTORY, code_of

MIB = 2**20
GIB = 2**30
V1_NONE = 9223372036854771712  # what version 1 says where there is no limit


def build(root, files):
    for path, content in files.items():
        target = pathlib.Path(root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return root


def meminfo(available_nbytes):
    kib = available_nbytes // 1024
    return {
        "proc/meminfo": (
            f"MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   {kib} kB\nCached: 5 kB\n"
        )
    }


def version_2(
    path, *, limit="max", high="max", used=0, inactive=0, active=0, mount="sys/fs/cgroup"
):
    level = f"{mount}/{path}".rstrip("/")
    stat = (
        f"anon 77\nfile 88\ninactive_anon 99\ninactive_file {inactive}\nactive_file"
        f" {active}\nslab_reclaimable 9\n"
    )
    return {
        f"{level}/memory.max": f"{limit}\n",
        f"{level}/memory.high": f"{high}\n",
        f"{level}/memory.current": f"{used}\n",
        f"{level}/memory.stat": stat,
    }


def version_1(path, *, limit=V1_NONE, used=0, inactive=0, active=0):
    level = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    # The lines without "total_" leave out the levels below.
    stat = (
        f"inactive_file 1\nactive_file 2\ntotal_inactive_file {inactive}\ntotal_active_file"
        f" {active}\n"
    )
    return {
        f"{level}/memory.limit_in_bytes": f"{limit}\n",
        f"{level}/memory.usage_in_bytes": f"{used}\n",
        f"{level}/memory.stat": stat,
    }


def member(*lines):
    return {"proc/self/cgroup": "".join(f"{line}\n" for line in lines)}


OF_64_GIB = meminfo(64 * GIB)
TREES = {
    "no cgroups": (OF_64_GIB, 64 * GIB),
    "2, no limit": (OF_64_GIB | member("0::/a") | version_2("a", used=GIB), 64 * GIB),
    "2, own limit": (
        OF_64_GIB | member("0::/a") | version_2("a", limit=8 * GIB, used=3 * GIB),
        5 * GIB,
    ),
    "2, limit of a parent": (
        OF_64_GIB
        | member("0::/a/b/c")
        | version_2("a", limit=8 * GIB, used=3 * GIB)
        | version_2("a/b/c", used=GIB),
        5 * GIB,
    ),
    "2, parent is tighter": (
        OF_64_GIB
        | member("0::/a/b")
        | version_2("a", limit=9 * GIB, used=7 * GIB)
        | version_2("a/b", limit=8 * GIB, used=3 * GIB),
        2 * GIB,
    ),
    "2, limit of a neighbour": (
        OF_64_GIB | member("0::/a") | version_2("b", limit=1, used=0),
        64 * GIB,
    ),
    "2, throttled before killed": (
        OF_64_GIB | member("0::/a") | version_2("a", limit=8 * GIB, high=6 * GIB, used=GIB),
        5 * GIB,
    ),
    "2, file cache can be dropped": (
        OF_64_GIB
        | member("0::/a")
        | version_2("a", limit=8 * GIB, used=8 * GIB, inactive=2 * GIB, active=GIB),
        3 * GIB,
    ),
    "2, more cache than use": (
        OF_64_GIB | member("0::/a") | version_2("a", limit=8 * GIB, used=GIB, inactive=2 * GIB),
        8 * GIB,
    ),
    "2, beyond the limit": (
        OF_64_GIB | member("0::/a") | version_2("a", limit=GIB, used=2 * GIB),
        0,
    ),
    "2, limit of nothing": (OF_64_GIB | member("0::/a") | version_2("a", limit=0), 0),
    "2, machine is tighter": (
        meminfo(GIB) | member("0::/a") | version_2("a", limit=8 * GIB, used=3 * GIB),
        GIB,
    ),
    "2, container sees itself as root": (
        OF_64_GIB | member("0::/") | version_2("", limit=8 * GIB, used=3 * GIB),
        5 * GIB,
    ),
    "2, container knows its host's path": (
        OF_64_GIB | member("0::/kubepods/pod1/main") | version_2("", limit=8 * GIB, used=3 * GIB),
        5 * GIB,
    ),
    "2, outside of what it sees": (
        OF_64_GIB
        | member("0::/../other")
        | version_2("", limit=8 * GIB)
        | {"sys/fs/other/memory.max": "1"},
        8 * GIB,
    ),
    "2, path with a colon and a space": (
        OF_64_GIB | member("0::/a: b") | version_2("a: b", limit=GIB),
        GIB,
    ),
    "2, path that is no text": (
        OF_64_GIB
        | {"proc/self/cgroup": b"0::/\xff\n"}
        | version_2(os.fsdecode(b"\xff"), limit=GIB),
        GIB,
    ),
    "1, no limit": (
        OF_64_GIB | member("4:memory:/a") | version_1("a", used=GIB) | version_1("", used=GIB),
        64 * GIB,
    ),
    "1, no limit, nothing else known": (member("4:memory:/a") | version_1("a", used=GIB), 0),
    "1, own limit": (
        OF_64_GIB
        | member("4:memory:/a", "3:cpu:/b")
        | version_1("a", limit=8 * GIB, used=6 * GIB, active=GIB),
        3 * GIB,
    ),
    "1, limit of a parent": (
        OF_64_GIB
        | member("4:memory:/a/b")
        | version_1("a", limit=8 * GIB, used=6 * GIB)
        | version_1("a/b"),
        2 * GIB,
    ),
    "1, with another controller": (
        OF_64_GIB | member("4:cpu,memory:/a") | version_1("a", limit=GIB),
        GIB,
    ),
    "1, another controller's path": (
        OF_64_GIB | member("4:cpu:/a") | version_1("a", limit=GIB),
        64 * GIB,
    ),
    "1, container knows its host's path": (
        OF_64_GIB
        | member("4:memory:/docker/abc")
        | version_1("", limit=8 * GIB, used=3 * GIB, inactive=GIB),
        6 * GIB,
    ),
    "both, memory in 1": (
        OF_64_GIB
        | member("4:memory:/a", "1:name=systemd:/b", "0::/b")
        | version_1("a", limit=2 * GIB)
        | {"sys/fs/cgroup/unified/b/cgroup.procs": "1"},
        2 * GIB,
    ),
    "both, memory in 2": (
        OF_64_GIB
        | member("4:cpu:/a", "0::/b")
        | version_2("b", limit=2 * GIB, mount="sys/fs/cgroup/unified"),
        2 * GIB,
    ),
    "limit without use": (
        OF_64_GIB | member("0::/a") | {"sys/fs/cgroup/a/memory.max": "1073741824\n"},
        GIB,
    ),
    "use without limit": (
        OF_64_GIB | member("0::/a") | {"sys/fs/cgroup/a/memory.current": "1073741824\n"},
        64 * GIB,
    ),
    "cgroup only": (member("0::/a") | version_2("a", limit=8 * GIB, used=3 * GIB), 5 * GIB),
    "nothing": ({}, 0),
    "no MemAvailable": ({"proc/meminfo": "MemTotal: 5 kB\n"}, 0),
    "nonsense": (
        OF_64_GIB
        | member("", ":", "::", "0::", "x", "0::/a")
        | {
            "sys/fs/cgroup/a/memory.max": b"\xff\0",
            "sys/fs/cgroup/a/memory.high": "\u00b2",
            "sys/fs/cgroup/a/memory.stat": "inactive_file\nactive_file x\n",
        },
        64 * GIB,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_what_is_available(name, tmp_path):
    files, expected_nbytes = TREES[name]

    assert available_nbytes(build(tmp_path, files)) == expected_nbytes


@pytest.mark.parametrize(
    "path",
    ["proc/self/cgroup", "sys/fs/cgroup/a/memory.max", "sys/fs/cgroup/a", "sys/fs/cgroup", "sys"],
)
def test_what_cannot_be_read_does_not_bound(path, tmp_path):
    files = OF_64_GIB | member("0::/a") | version_2("a", limit=GIB)
    build(tmp_path, {name: content for name, content in files.items() if not name.startswith(path)})
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).symlink_to(path.rpartition("/")[2])  # ELOOP: unreadable even for root

    assert available_nbytes(tmp_path) == 64 * GIB


def test_this_machine_has_some_memory():
    assert 0 < available_nbytes() < 2**60


# Any tree

sizes = st.integers(0, 2**45)
levels = st.fixed_dictionaries(
    {
        "limit": st.none() | sizes,
        "used": sizes,
        "inactive": sizes,
        "active": sizes,
    }
)


def room_nbytes(level):
    return level["limit"] - max(0, level["used"] - level["inactive"] - level["active"])


@given(st.integers(0, 2**35), st.lists(levels, max_size=5), st.lists(levels, max_size=5))
def test_the_tightest_of_all_levels_counts(machine_kib, chain_1, chain_2):
    files = meminfo(machine_kib * 1024)
    paths = ["/".join("abcd"[:depth]) for depth in range(5)]
    files |= member(
        f"7:memory:/{paths[max(0, len(chain_1) - 1)]}", f"0::/{paths[max(0, len(chain_2) - 1)]}"
    )
    for path, level in zip(paths, chain_1, strict=False):
        files |= version_1(
            path, **level | {"limit": V1_NONE if level["limit"] is None else level["limit"]}
        )
    for path, level in zip(paths, chain_2, strict=False):
        files |= version_2(
            path, **level | {"limit": "max" if level["limit"] is None else level["limit"]}
        )

    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY) as root:
        found_nbytes = available_nbytes(build(root, files))

    bounds = [room_nbytes(level) for level in [*chain_1, *chain_2] if level["limit"] is not None]
    assert found_nbytes == max(0, min([machine_kib * 1024, *bounds]))


FILES = [*(OF_64_GIB | member("0::/a", "4:memory:/a") | version_2("a") | version_1("a"))]


@given(
    st.dictionaries(
        st.sampled_from(FILES), st.binary(max_size=40) | st.from_regex(rb"[a-z_ \d:/.-]{0,40}")
    )
)
def test_no_content_of_files_makes_it_raise(contents):
    files = (
        OF_64_GIB
        | member("0::/a", "4:memory:/a")
        | version_2("a", limit=GIB)
        | version_1("a", limit=GIB)
    )

    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY) as root:
        assert available_nbytes(build(root, files | contents)) >= 0


# How many slots


@pytest.mark.parametrize(
    ("image", "wanted", "available", "shared_by", "slots"),
    [
        (10 * GIB, 2, 64 * GIB, 1, 2),
        (10 * GIB, 1, 64 * GIB, 1, 1),
        (10 * GIB, 0, 64 * GIB, 1, 0),
        (10 * GIB, 2, 64 * GIB, 2, 2),
        (10 * GIB, 2, 64 * GIB, 4, 1),
        (10 * GIB, 2, 64 * GIB, 8, 0),
        (19 * GIB, 2, 40 * GIB, 1, 2),  # 5 % stay
        (19 * GIB + 1, 2, 40 * GIB, 1, 1),
        (GIB, 1, GIB + 256 * MIB, 1, 1),  # 256 MiB stay
        (GIB, 1, GIB + 256 * MIB - 1, 1, 0),
        (GIB, 2, 2 * GIB + 512 * MIB, 2, 1),  # for each trainer
        (0, 2, 0, 1, 0),
        (0, 2, GIB, 1, 2),
    ],
)
def test_how_many_slots_there_are(image, wanted, available, shared_by, slots):
    assert plan_slots(image, wanted, available, shared_by) == slots


@given(st.integers(0, 2**42), st.integers(0, 4), st.integers(0, 2**45), st.integers(1, 64))
def test_slots_are_as_many_as_leave_each_trainer_its_margin(image, wanted, available, shared_by):
    slots = plan_slots(image, wanted, available, shared_by)
    share = available // shared_by

    def fits(count):
        return count * slot_nbytes(image) + margin_nbytes(share) <= share

    assert 0 <= slots <= wanted
    assert slots == 0 or fits(slots)
    assert slots == wanted or not fits(slots + 1)


@pytest.mark.parametrize(
    "arguments",
    [(-1, 2, GIB, 1), (1, -1, GIB, 1), (1, 2, -1, 1), (1, 2, GIB, 0)],
    ids=["image", "wanted", "available", "shared_by"],
)
def test_numbers_out_of_range_are_refused(arguments):
    assert code_of(lambda: plan_slots(*arguments)) == "ARGUMENT"


def test_the_documented_memory_of_a_node_is_what_is_planned():
    """Of 8 processes with 60 GB each, where 90 % of a node's memory is available."""
    text = (ROOT / "docs/operating.md").read_text()
    section = text.partition("### Memory of a node\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d,]+) GiB \| (\d)(.*?) \|", section, re.MULTILINE)
    assert len(rows) == 6
    for gib, first, more in rows:
        available = int(gib.replace(",", "")) * 2**30 * 9 // 10
        planned = plan_slots(60 * 10**9, 2, available, 8)
        assert planned == int(first) + ("a second" in more), gib
