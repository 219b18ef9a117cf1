"""What was saved because something was wrong: the run doesn't go on from it, unless somebody chooses it."""

import pytest

import ckptfmt
from ckptfmt.commit.decision import retire
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import Code
from ckptfmt.run.catalog import Run
from ckptfmt.run.retention import Retention, clean_up
from tests.builders import code_of, error_of
from tests.run.test_lineage import RunOfSteps, manifests
from tests.run.test_retention import committed, planned

SUSPECT = Labels(suspect="step 30: grad_norm is nan")
THIRD = checkpoint_name(30, 1)


@pytest.fixture
def marked(home):
    """Three checkpoints of one launch, the newest suspect."""
    made = RunOfSteps(home.store())
    made.begin()
    return made.save(10, 20).save(30, labels=SUSPECT)


def test_a_launch_passes_over_it_by_name(marked):
    """REQ-RUN-042, REQ-RUN-006, REQ-RUN-007"""
    launch = marked.begin()
    assert (launch.resume_from.name, launch.chosen_by) == (checkpoint_name(20, 1), "lineage")
    assert marked.passed_over == [f"{THIRD} is suspect: step 30: grad_norm is nan"]


def test_a_run_that_is_opened_is_opened_without_it(marked):
    """REQ-RUN-020, REQ-RUN-042"""
    assert Run(marked.store).newest().step == 20
    with Run(marked.store).open() as checkpoint:
        assert (checkpoint.step, checkpoint.suspect) == (20, None)
    with Run(marked.store).open(30) as checkpoint:
        assert (checkpoint.step, checkpoint.suspect) == (30, SUSPECT.suspect)


def test_what_somebody_chose_is_gone_on_from_by_all_later_launches(marked):
    """REQ-RUN-042: the lineage of a launch that began there by hand leads there."""
    marked.begin(choose=THIRD)
    assert marked.head() == THIRD  # launch 2 saved nothing
    assert marked.passed_over == []
    marked.save(40, labels=Labels(suspect="again"))
    assert marked.head() == THIRD
    marked.save(35)
    assert marked.head() == checkpoint_name(35, 4)


def test_what_a_launch_saved_behind_it_is_gone_on_from(marked):
    marked.begin()
    assert marked.save(25).head() == checkpoint_name(25, 2)
    assert len(marked.passed_over) == 1  # by launch 2; launch 3 doesn't come by it


def test_nothing_but_suspect_is_no_fresh_start(home):
    """REQ-RUN-010, REQ-RUN-042, REQ-RUN-020"""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(10, 20, labels=SUSPECT)
    error = error_of(made.begin)
    assert error.code == Code.NO_VALID_CHECKPOINT
    assert (
        "step-00000020-l0001, step-00000010-l0001; none of them is valid and not suspect"
        in error.detail
    )
    opened = error_of(Run(made.store).newest)
    assert opened.code == Code.NOT_COMMITTED
    assert "are suspect" in opened.detail
    assert checkpoint_name(20, 1) in opened.detail
    assert all(
        way in str(opened.remedy) for way in ("by its name", "resume= and the name", "'fresh'")
    )
    assert made.begin(fresh=True).resume_from is None
    assert made.begin(choose=checkpoint_name(10, 1)).resume_from.name == checkpoint_name(10, 1)


def test_damage_and_doubt_are_told_apart(marked):
    marked.damage(20, 1)
    assert marked.begin().chosen_by == "fallback"
    assert ["suspect" in sentence for sentence in marked.passed_over] == [True, False]
    assert marked.launch.resume_from.name == checkpoint_name(10, 1)


# --- retention


def test_it_is_not_counted_and_the_last_good_one_stays(marked):
    """REQ-CMT-026: whatever is kept, the run has something to go on from."""
    for keep in (1, 2):
        assert (20, 1) not in planned(marked, newest=keep)
        assert (30, 1) not in planned(marked, newest=keep)
    assert planned(marked, newest=1) == [(10, 1)]
    marked.save(40, 50, labels=SUSPECT)
    assert planned(marked, newest=1) == [(10, 1)]


def test_it_goes_when_as_many_as_are_kept_have_greater_steps(marked):
    """REQ-CMT-026: it is somebody's to look at; it mustn't stay for ever either."""
    marked.begin()
    assert planned(marked, newest=1) == [(10, 1)]
    marked.save(25)
    assert planned(marked, newest=1) == [(10, 1), (20, 1)]
    marked.save(35)
    assert planned(marked, newest=2) == [(10, 1), (20, 1)]
    assert planned(marked, newest=1, every=10) == [(25, 2), (30, 1)]
    clean_up(marked.store, marked.run, launch=2, retention=Retention(newest=1))
    assert committed(marked) == [(35, 2)]


def test_in_the_launch_that_went_on_it_goes_likewise(marked):
    marked.save(40)
    assert planned(marked, newest=2) == [(10, 1)]
    assert planned(marked, newest=1) == [(10, 1), (20, 1), (30, 1)]


def test_it_is_not_the_first_save_of_a_launch(home):
    """REQ-CMT-026: what a launch resumed from stays until that has saved something that can be gone on from."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(10, 20).begin(choose=checkpoint_name(10, 1))
    made.save(30, labels=SUSPECT)
    assert planned(made, newest=1) == []
    assert code_of(lambda: Run(made.store).delete(checkpoint_name(10, 1))) == Code.CHECKPOINT_NEEDED
    assert made.head() == checkpoint_name(10, 1)


def test_the_best_is_not_among_the_suspect(home):
    made = RunOfSteps(home.store())
    made.begin()
    for step, loss in ((10, 3), (20, 2), (40, 5)):
        made.save(step, labels=Labels.of({"loss": loss}))
    made.save(30, labels=Labels.of({"loss": 1}, suspect="too good"))
    assert Run(made.store).best("loss").step == 20
    assert (20, 1) not in planned(made, newest=1, best=("loss", "min", 1))


def test_the_mark_outlives_what_is_said_later(marked):
    """REQ-MAN-013: records of labels neither add it nor take it back."""
    run = Run(marked.store)
    run.set_metrics(30, {"loss": 2.5})
    run.tag(30, "release")
    found = run.find(30)
    assert (found.suspect, found.tags, dict(found.metrics)) == (
        SUSPECT.suspect,
        ("release",),
        {"loss": 2.5},
    )
    assert run.find(20).suspect is None
    assert marked.head() == checkpoint_name(20, 1)


def test_one_that_is_retired_is_passed_over_no_more(marked):
    retire(marked.place(30), manifests(marked)[-1])
    assert marked.head() == checkpoint_name(20, 1)
    assert marked.passed_over == []


# --- through a checkpointer


@pytest.mark.parametrize(
    ("saver", "delta"), [("process", "off"), ("thread", "smallest"), ("inline", "off")]
)
def test_a_save_says_why_and_the_next_start_goes_back(tmp_path, saver, delta):
    position = {"position": 0}
    state = ckptfmt.State(data=position)
    with ckptfmt.Checkpointer(tmp_path, state, saver=saver, delta=delta) as checkpointer:
        for step, suspect in ((1, None), (2, "loss is nan")):
            position["position"] = step
            checkpointer.save(step=step, suspect=suspect)
    assert [one.suspect for one in Run(tmp_path).list()] == [None, "loss is nan"]
    assert ckptfmt.validate(tmp_path).valid
    with ckptfmt.Checkpointer(tmp_path, state, saver="inline") as checkpointer:
        assert (checkpointer.step, position) == (1, {"position": 1})
        assert checkpointer.passed_over == ["step-00000002-l0001 is suspect: loss is nan"]
    name = Run(tmp_path).find(2).name
    with ckptfmt.Checkpointer(tmp_path, state, saver="inline", resume=name) as checkpointer:
        assert (checkpointer.step, position) == (2, {"position": 2})


@pytest.mark.parametrize("reason", ["", "x" * 1001, "e\u0301", 3])
def test_a_reason_that_no_document_could_hold_is_refused(tmp_path, reason):
    state = ckptfmt.State(data={"position": 0})
    with ckptfmt.Checkpointer(tmp_path, state, saver="inline") as checkpointer:
        assert code_of(lambda: checkpointer.save(step=1, suspect=reason)) == Code.ARGUMENT
