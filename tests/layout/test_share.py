"""Who reads what: each shared byte is read by one of those who want it, and the work is spread."""

from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.read.sharing import plan_rounds, split_shared


def spans():
    """Return a strategy of disjoint spans of two files."""
    pieces = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6)

    def lay_out(path, drawn):
        found, at = [], 0
        for gap, nbytes in drawn:
            found.append((path, at + gap, at + gap + nbytes))
            at += gap + nbytes
        return found

    return st.tuples(pieces, pieces).map(lambda pair: lay_out("a", pair[0]) + lay_out("b", pair[1]))


@given(st.lists(spans(), min_size=1, max_size=4), st.integers(1, 7))
def test_what_two_want_is_read_by_one_of_them(wanted, parcel_nbytes):
    wanters: dict[tuple[str, int], set[int]] = {}
    for process, theirs in enumerate(wanted):
        for path, begin, end in theirs:
            for at in range(begin, end):
                wanters.setdefault((path, at), set()).add(process)
    found = {}
    for parcel in split_shared(wanted, parcel_nbytes=parcel_nbytes):
        assert parcel.nbytes <= parcel_nbytes
        assert parcel.reader in parcel.wanters
        for at in range(parcel.byte_begin, parcel.byte_begin + parcel.nbytes):
            assert (parcel.path, at) not in found
            found[parcel.path, at] = set(parcel.wanters)
        # In one span of each: what is between two is another parcel.
        for process in parcel.wanters:
            assert any(
                path == parcel.path
                and begin <= parcel.byte_begin
                and parcel.byte_begin + parcel.nbytes <= end
                for path, begin, end in wanted[process]
            )
    assert found == {place: who for place, who in wanters.items() if len(who) > 1}


def test_the_work_is_spread():
    """Also where one of them has more to read for itself alone."""
    parcels = split_shared([[("a", 0, 800)], [("a", 0, 800)]], parcel_nbytes=100)
    assert [
        sum(parcel.nbytes for parcel in parcels if parcel.reader == process) for process in (0, 1)
    ] == [400, 400]
    parcels = split_shared([[("a", 0, 800), ("b", 0, 400)], [("a", 0, 800)]], parcel_nbytes=100)
    assert [
        sum(parcel.nbytes for parcel in parcels if parcel.reader == process) for process in (0, 1)
    ] == [200, 600]


def test_what_is_small_is_left_to_everybody():
    wanted = [[("a", 0, 10), ("a", 10, 1000)]] * 2
    assert [
        parcel.byte_begin for parcel in split_shared(wanted, parcel_nbytes=1000, least_nbytes=11)
    ] == [10]


@given(st.lists(spans(), min_size=1, max_size=4), st.integers(1, 7), st.integers(1, 30))
def test_rounds_keep_the_order_and_the_limit(wanted, parcel_nbytes, round_nbytes):
    """REQ-OPN-008: what a process holds of a round is bounded, but for a single parcel."""
    parcels = split_shared(wanted, parcel_nbytes=parcel_nbytes)
    rounds = plan_rounds(parcels, len(wanted), round_nbytes)
    assert [parcel for group in rounds for parcel in group] == list(parcels)
    for group in rounds:
        for process in range(len(wanted)):
            held = [parcel.nbytes for parcel in group if process in parcel.wanters]
            assert len(held) <= 1 or sum(held) <= round_nbytes
