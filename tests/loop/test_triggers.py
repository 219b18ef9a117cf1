"""Triggers: what is noticed, and that all processes do the same about it at one step."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.labels import Labels
from ckptfmt.errors import CkptError, Code
from ckptfmt.loop.triggers import Triggers
from ckptfmt.run.catalog import Run
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of, error_of
from tests.house.sources import ROOT
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import Trainer, committed
from tests.saver.test_saver import WAIT_S


def suspect(store: Any) -> dict[int, str | None]:
    """Why each checkpoint of a run is suspect, by step."""
    return {one.step: one.suspect for one in Run(store).list() if one.state == "committed"}


def train(
    store: Any, triggers: Triggers, feed: dict[int, dict[str, float]], **options: Any
) -> tuple[Trainer, Any]:
    """Train ten steps; feed each step's numbers, by default a loss and a norm of 1."""
    trainer = Trainer()
    with Checkpointer(
        store, trainer.state, **{"saver": "inline", **options}, triggers=triggers
    ) as checkpointer:
        for step in checkpointer.steps(10):
            trainer.step(step)
            triggers.feed(**feed.get(step, {"loss": 1.0, "grad_norm": 1.0}))
    return trainer, checkpointer


# --- what is noticed ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_alarm(name: str, number: float) -> None:
    triggers = Triggers()
    triggers.feed(loss=1, grad_norm=1)
    assert triggers.look() is None
    triggers.feed(**{name: number})
    assert triggers.reason == f"{name} is {number}"
    triggers.feed(loss=math.nan)
    assert triggers.reason == f"{name} is {number}"  # the first one stands


def test_a_norm_is_compared_with_the_average_of_those_before() -> None:
    triggers = Triggers(norm_factor=4, norm_count=10)
    for norm in (
        100,
        50,
        *[1] * 10,
    ):  # the first ten are compared with nothing; two are forgotten since
        triggers.feed(grad_norm=norm)
    triggers.feed(grad_norm=4)
    assert triggers.look() is None
    triggers.feed(grad_norm=5.3)  # the average is 1.3
    assert triggers.reason == "grad_norm is 5.3, more than 4 times the average of 1.3"
    calm = Triggers(norm_factor=None)
    for calm_norm in (*[1.0] * 20, 1e9):
        calm.feed(grad_norm=calm_norm)
    assert calm.reason is None


def test_a_loss_that_rises_again_and_again_is_an_alarm() -> None:
    triggers = Triggers(rising=3)
    for loss in (1, 2, 3, 3, 4, 5, 1, 2, 3):
        triggers.feed(loss=loss)
    assert triggers.look() is None
    triggers.feed(loss=4)
    assert triggers.reason == "loss rose 3 times in a row, to 4"


def test_a_reason_is_one_that_a_manifest_can_hold() -> None:
    triggers = Triggers()
    triggers.alarm(" node 7:\n\ttoo hot \x00 " + "x" * 300)
    assert triggers.reason is not None
    assert triggers.reason.startswith("node 7: too hot \\x00 xxx")
    assert Labels.of(suspect=triggers.reason).suspect == triggers.reason
    nothing = Triggers()
    nothing.alarm("")
    assert nothing.reason == "an alert without a reason"


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "pray"}, {"norm_factor": 0.5}, {"norm_factor": math.nan}, {"norm_count": 9}, {"rising": 0},
        {"timeout_s": 0}, {"timeout_s": math.inf}, {"signals": [signal.SIGKILL]},
    ],
)  # fmt: skip
def test_what_is_no_trigger_is_refused_at_once(wrong: dict[str, Any]) -> None:
    assert code_of(lambda: Triggers(**wrong)) == Code.ARGUMENT


# --- what is done about it ------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, None, "1h"])
def test_the_step_is_saved_as_suspect_and_the_next_start_goes_back(every: Any) -> None:
    store = MemoryStore()
    with Checkpointer(store, Trainer().state, saver="inline") as checkpointer:
        checkpointer.save(step=0)
    trainer, checkpointer = train(store, Triggers(), {5: {"loss": math.nan}}, every=every)
    assert (checkpointer.step, checkpointer.stopped, checkpointer.alarm) == (
        6,
        True,
        "step 6: loss is nan",
    )
    found = suspect(store)
    assert found.pop(6) == "step 6: loss is nan"
    assert found == {0: None, 2: None, 4: None} if every == 2 else {0: None}
    good = max(found)

    again = Trainer()
    with Checkpointer(store, again.state, saver="inline") as checkpointer:
        assert checkpointer.step == good
        assert "is suspect: step 6: loss is nan" in checkpointer.passed_over[0]
    chosen = Trainer()
    with Checkpointer(
        store, chosen.state, saver="inline", resume=Run(store).find(6).name
    ) as checkpointer:
        assert chosen.weights["w"].tobytes() == trainer.weights["w"].tobytes()


def test_without_an_alarm_nothing_is_different() -> None:
    stores = MemoryStore(), MemoryStore()
    train(stores[0], Triggers(), {}, every=2)
    with Checkpointer(
        stores[1], (trainer := Trainer()).state, saver="inline", every=2
    ) as checkpointer:
        for step in checkpointer.steps(10):
            trainer.step(step)
    assert committed(stores[0]) == committed(stores[1])
    assert set(suspect(stores[0]).values()) == {None}


@pytest.mark.parametrize("action", ["stop", "back"])
def test_nothing_is_saved_where_that_is_asked_for(action: Any) -> None:
    store, feed = MemoryStore(), {5: {"grad_norm": math.inf}}
    if action == "back":
        error = error_of(lambda: train(store, Triggers(action), feed, every=2))
        assert (error.code, error.detail) == (Code.ALARM, "step 6: grad_norm is inf")
    else:
        _, checkpointer = train(store, Triggers(action), feed, every=2)
        assert (checkpointer.step, checkpointer.stopped) == (6, True)
        assert checkpointer.save() is None
    assert suspect(store) == {2: None, 4: None}


def test_a_save_by_the_program_is_no_ordinary_one_after_an_alarm() -> None:
    """Frameworks count by themselves, and call save: nobody asks anything between two saves."""
    store, triggers = MemoryStore(), Triggers()
    with Checkpointer(store, Trainer().state, saver="inline", triggers=triggers) as checkpointer:
        checkpointer.save(step=1)
        triggers.feed(loss=math.nan)
        checkpointer.save(step=2, metrics={"loss": 9})
        assert (checkpointer.stopped, checkpointer.alarm) == (True, "step 2: loss is nan")
        checkpointer.save(step=3, suspect="by hand")
    assert suspect(store) == {1: None, 2: "step 2: loss is nan", 3: "by hand"}
    assert Run(store).find(2).metrics == {"loss": 9}


def test_a_save_that_a_body_asks_for_in_the_step_of_an_alarm_is_suspect() -> None:
    store, triggers, trainer = MemoryStore(), Triggers(), Trainer()
    with Checkpointer(store, trainer.state, saver="inline", triggers=triggers) as checkpointer:
        for step in checkpointer.steps(10):
            if step == 3:
                checkpointer.save(tags=["wanted"])
                triggers.feed(loss=math.nan)
    assert suspect(store) == {4: "step 4: loss is nan"}
    assert Run(store).find(4).tags == ("wanted",)


@pytest.mark.parametrize("action", ["save", "drain"])
@pytest.mark.parametrize("how", ["alert", "file", "signal", "thread"])
def test_a_notice_from_outside_is_no_evidence_against_the_state(
    tmp_path: Any, caplog: Any, how: str, action: Any
) -> None:
    """A save before a machine is lost was marked suspect, so that the next start threw its steps away.

    What the program says by `alarm` is evidence with "save"; the log names the action for a notice
    that isn't.
    """
    told: list[str] = []
    triggers = Triggers(
        action,
        alert=lambda: told[0] if told else None,
        file=tmp_path / "stop",
        signals=[signal.SIGUSR1] * (how == "signal"),
    )
    store, trainer = MemoryStore(), Trainer()
    before = signal.getsignal(signal.SIGUSR1)
    with Checkpointer(
        store, trainer.state, saver="inline", every=2, triggers=triggers
    ) as checkpointer:
        for step in checkpointer.steps(10):
            trainer.step(step)
            if step == 2 and how == "alert":
                told.append("GPU 3 is hot")
            elif step == 2 and how == "file":
                (tmp_path / "stop").write_text("GPU 3 is hot\nand more\n")
            elif step == 2 and how == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif step == 2:
                thread = threading.Thread(target=triggers.alarm, args=("GPU 3 is hot",))
                thread.start()
                thread.join()
    assert signal.getsignal(signal.SIGUSR1) == before
    reason = "step 3: SIGUSR1" if how == "signal" else "step 3: GPU 3 is hot"
    assert (checkpointer.step, checkpointer.stopped, checkpointer.alarm) == (3, True, reason)
    is_evidence = (how, action) == ("thread", "save")
    assert suspect(store) == {2: None, 3: reason if is_evidence else None}
    assert ("Triggers('drain')" in caplog.text) == is_evidence
    with Checkpointer(store, Trainer().state, saver="inline") as checkpointer:
        assert checkpointer.step == (2 if is_evidence else 3)


@pytest.mark.parametrize("action", ["save", "drain"])
@pytest.mark.parametrize("order", ["alert first", "number first"])
def test_a_number_that_is_wrong_is_evidence_beside_a_notice_from_outside(
    action: Any, order: str
) -> None:
    store = MemoryStore()
    told: list[int] = []
    triggers = Triggers(action, alert=lambda: "drain node 7" if told else None)
    with Checkpointer(store, Trainer().state, saver="inline", triggers=triggers) as checkpointer:
        for step in checkpointer.steps(10):
            if step == 2:
                told.append(step)
                if order == "alert first":
                    triggers.look()
                triggers.feed(loss=math.nan)
    assert checkpointer.alarm == "step 3: loss is nan"
    assert suspect(store) == {3: "step 3: loss is nan"}


def test_a_number_that_goes_wrong_after_a_notice_marks_the_saves_that_follow() -> None:
    store = MemoryStore()
    triggers = Triggers("drain", alert=lambda: "drain node 7")
    with Checkpointer(store, Trainer().state, saver="inline", triggers=triggers) as checkpointer:
        checkpointer.save(step=1)
        triggers.feed(loss=math.nan)
        checkpointer.save(step=2)
    assert suspect(store) == {1: None, 2: "step 2: loss is nan"}


def test_evidence_of_any_process_counts_before_a_notice_of_a_lower_one() -> None:
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> str | None:
        trainer = Trainer()
        triggers = Triggers("drain", alert=lambda: "drain node 7" if writer == 0 else None)
        checkpointer = Checkpointer(
            store, trainer.state, saver="thread", writer=(writer, 2), agree=allgather.of(writer), deadline_s=WAIT_S,
            triggers=triggers,
        )  # fmt: skip
        with checkpointer:
            for step in checkpointer.steps(3):
                trainer.step(step)
                triggers.feed(loss=math.nan if writer == 1 else 1.0)
        return checkpointer.alarm

    assert run_writers(2, body) == ["step 1: loss is nan"] * 2
    assert suspect(store) == {1: "step 1: loss is nan"}


def test_an_alert_that_fails_is_an_error_of_the_training() -> None:
    def fail() -> None:
        raise OSError("no route to the monitor")

    with pytest.raises(OSError, match="no route"):
        train(MemoryStore(), Triggers(alert=fail), {})


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["save", "stop", "back"])
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("every", [None, 4, "1h"])
def test_all_do_the_same_at_one_step_whoever_notices(action: Any, who: int, every: Any) -> None:
    """REQ-CMT-001: one exchange tells all, and no save after what was noticed is an ordinary one."""
    store, allgather = MemoryStore(), Allgather(3)
    raised: list[CkptError] = []

    def body(writer: int) -> tuple[list[int], bool, str | None]:
        trainer, done, triggers = Trainer(), [], Triggers(action)
        checkpointer = Checkpointer(
            store, trainer.state, every=every, saver="thread", writer=(writer, 3), agree=allgather.of(writer),
            deadline_s=WAIT_S, triggers=triggers,
        )  # fmt: skip
        checkpointer._pace.clock = lambda: checkpointer.step * 0.25
        with checkpointer:
            try:
                for step in checkpointer.steps(100):
                    trainer.step(step)
                    done.append(step)
                    triggers.feed(loss=math.nan if step >= 10 and writer == who else 1.0)
            except CkptError as error:
                raised.append(error)
        return done, checkpointer.stopped, checkpointer.alarm

    found = run_writers(3, body)
    assert found[0] == found[1] == found[2]
    done, stopped, alarm = found[0]
    assert (stopped, alarm) == (True, "step 11: loss is nan")  # the first such step
    # One second at most until it is asked for, by the clock of the test; sooner where a save is
    # due.
    assert 11 <= len(done) <= (12 if every == 4 else 16)
    assert [str(error.code) for error in raised] == ["ALARM"] * 3 * (action == "back")
    good = dict.fromkeys((4, 8)) if every == 4 else {}
    assert suspect(store) == good | ({len(done): alarm} if action == "save" else {})


# --- a step that hangs ----------------------------------------------------------------------------

_HANGS = """
import sys, time, ckptfmt
state = ckptfmt.State(data={"position": 0})
triggers = ckptfmt.Triggers(timeout_s=float(sys.argv[2]))
with ckptfmt.Checkpointer(sys.argv[1], state, triggers=triggers) as checkpointer:
    for step in checkpointer.steps(3):
        if step == 1:
            checkpointer.save(step=None)
        if step == 2:
            handle = checkpointer._handle
            handle.wait("STAGED")
            def hang_here():
                time.sleep(3600)
            hang_here()
"""


def test_a_step_that_hangs_ends_the_process_and_its_staged_save_is_committed(tmp_path: Any) -> None:
    """The stacks say where it hangs; the saver finishes; the next start waits for it."""
    done = subprocess.run(
        [sys.executable, "-c", _HANGS, tmp_path, "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == Triggers.exit_code == 75, done.stderr
    assert re.search(
        r"STEP_OVERDUE at Triggers\(timeout_s=\): no step began within 3 s", done.stderr
    )
    assert "in hang_here" in done.stderr
    assert "ckptfmt-watchdog" in done.stderr or "in _watch" in done.stderr  # all threads
    state = ckptfmt.State(data={"position": 0})
    with Checkpointer(tmp_path, state, saver="inline", allow="streams") as checkpointer:
        assert checkpointer.step == 2


def test_a_watchdog_is_there_only_while_it_is_asked_for() -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    for timeout_s in (None, 600):
        trainer, triggers = Trainer(), Triggers(timeout_s=timeout_s)
        with Checkpointer(
            MemoryStore(), trainer.state, saver="inline", triggers=triggers
        ) as checkpointer:
            for step in checkpointer.steps(2):
                trainer.step(step)
                assert ("ckptfmt-watchdog" in names()) == (timeout_s is not None)
            assert "ckptfmt-watchdog" not in names()


def test_no_step_is_watched_behind_a_loop_that_was_left_nor_while_a_stopped_run_is_saved() -> None:
    def is_watched() -> bool:
        return any(thread.name == "ckptfmt-watchdog" for thread in threading.enumerate())

    trainer, triggers = Trainer(), Triggers(timeout_s=600)
    with Checkpointer(
        MemoryStore(), trainer.state, saver="inline", triggers=triggers
    ) as checkpointer:
        for step in checkpointer.steps(4):
            trainer.step(step)
            if step == 1:
                break
        assert not is_watched()  # an evaluation at the end may take as long as it takes
        seen: list[bool] = []
        save = checkpointer._saves.save

        def look_and_save(*given: Any, **options: Any) -> Any:
            seen.append(is_watched())
            return save(*given, **options)

        checkpointer._saves.save = look_and_save  # type: ignore[method-assign]
        for step in checkpointer.steps(4):
            trainer.step(step)
            assert is_watched() == (step > 1)
            triggers.feed(loss=math.nan if step == 2 else 1.0)
        assert seen == [False]
    assert checkpointer.stopped


def test_a_file_that_can_not_be_looked_for_is_no_alarm(tmp_path: Any, caplog: Any) -> None:
    """Such as one on storage that is away for a moment."""
    triggers = Triggers(file=tmp_path)
    train(MemoryStore(), triggers, {})
    assert triggers.reason is None
    assert caplog.text.count("can't look for") == 1


def test_who_uses_no_triggers_imports_none() -> None:
    program = (
        "import sys, tempfile, ckptfmt\n"
        "with ckptfmt.Checkpointer(tempfile.mkdtemp(), ckptfmt.State(data=1), saver='inline') as"
        " checkpointer:\n"
        "    checkpointer.save(step=1)\n"
        "assert 'ckptfmt.loop.triggers' not in sys.modules\n"
        "assert 'faulthandler' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120, capture_output=True
    )
