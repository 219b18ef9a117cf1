"""At least 300 combinations of a fault and a step of a run on an S3 server: the promises hold after each."""

import contextlib

import pytest

from ckptfmt.commit import decision
from ckptfmt.errors import CkptError, Code
from ckptfmt.run import retention, save_job
from ckptfmt.store import objects
from ckptfmt.store.objects import ObjectStore
from tests.s3.fault_campaign import SCENARIOS, Campaign, Combination
from tests.s3.fixtures import Bucket
from tests.s3.proxy import Proxy

#: How many combinations of each scenario the long campaign plays, drawn by chance.
COUNT = 60
#: What the short one plays.
SHORT = ("save", "delta", "two writers", "save that retires", "resume", "mirror")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Shorter pauses, parts and deadlines: the same steps in less time."""
    monkeypatch.setattr(objects, "_PART_NBYTES", 5 << 20)
    monkeypatch.setattr(objects, "_PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(objects, "_DEADLINE_S", 0.1)


@pytest.fixture(scope="module")
def campaign(s3_server):
    with Proxy(s3_server) as proxy:
        yield Campaign(Bucket(s3_server, s3_server.make_bucket()), proxy)


def play(campaign, combinations):
    """Play them; return what was wrong, in words."""
    wrongs = []
    for one in combinations:
        outcome = campaign.play(one)
        wrongs += [f"{one} [{outcome.said}]: {wrong}" for wrong in outcome.wrongs]
    return wrongs


def test_faults_drawn_by_chance_break_no_promise(campaign):
    combinations = campaign.sample(0, 4, SHORT)

    assert play(campaign, combinations) == []

    assert len(campaign.met & set(combinations)) >= 3


@pytest.mark.exhaustive
@pytest.mark.timeout(
    6000
)  # each combination has a guard of its own, and a busy machine takes ten seconds for one
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whatever_fault_meets_whatever_step_no_promise_is_broken(campaign, scenario):
    combinations = campaign.sample(1, COUNT, [scenario])

    assert play(campaign, combinations) == []

    met = campaign.met & set(combinations)
    assert len(met) >= len(combinations) * 0.8


@pytest.mark.exhaustive
def test_the_campaign_has_met_300_combinations(campaign, capsys):
    """Behind the others, in this file's order."""
    with capsys.disabled():
        print(f"\n{len(campaign.met)} combinations, whose scenarios said {dict(campaign.said)}")  # noqa: T201

    assert len(campaign.met) >= 300


# --- the campaign can fail ------------------------------------------------------------------------


def _take_a_lost_answer_for_success(monkeypatch):
    right = ObjectStore.create

    def create(self, path, chunks):
        try:
            right(self, path, chunks)
        except CkptError as error:
            if error.code != Code.STORE_NO_ANSWER:
                raise

    monkeypatch.setattr(ObjectStore, "create", create)


def _delete_when_the_outcome_is_unknown(monkeypatch):
    right = decision.decide

    def decide(store, origin, **options):
        try:
            return right(store, origin, **options)
        except CkptError:
            decision.sweep(store)
            raise

    monkeypatch.setattr(save_job, "decide", decide)


def _leave_what_a_clean_up_left(monkeypatch):
    monkeypatch.setattr(retention, "sweep", lambda _: None)


def _let_errors_through(monkeypatch):
    monkeypatch.setattr(ObjectStore, "_named_errors", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("break_it", "combination", "verdict"),
    [
        (
            _take_a_lost_answer_for_success,
            Combination("save", "PutObject", "register", "DROP_REQUEST", "all"),
            "was acknowledged, and here is None",
        ),
        pytest.param(
            _delete_when_the_outcome_is_unknown,
            Combination("save", "PutObject", "register", "LATE", "all"),
            "FILE_MISSING",
            marks=pytest.mark.exhaustive,
        ),
        (
            _leave_what_a_clean_up_left,
            Combination("abort", "DeleteObjects", "shard", "DROP_REQUEST", "all"),
            "nothing refers to",
        ),
        pytest.param(
            _let_errors_through,
            Combination("retire", "PutObject", "register", "DROP_REQUEST", "all"),
            "no error of ckptfmt",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["lost answer", "unknown outcome", "left files", "errors"],
)
def test_the_campaign_convicts_who_breaks_a_promise(
    campaign, monkeypatch, break_it, combination, verdict
):
    assert play(campaign, [combination]) == []
    break_it(monkeypatch)

    assert verdict in "\n".join(play(campaign, [combination]))
