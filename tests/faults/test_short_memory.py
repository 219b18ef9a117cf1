"""Address space that runs out while slots are made: fewer of them, or none, and the run is saved all the same."""

import pytest

from tests.faults.driver import PATIENCE_S, committed, problems, start

#: Limits its address space to what it has and some more, and saves three steps of a state of 96
#: MiB.
SCRIPT = """
import resource

def address_space_nbytes():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmSize:")]
    return int(line.split()[1]) * 1024

toy = Toy(96 << 20)
# What Python and C library take as they save for the first time isn't what this is about.
with Checkpointer(run + "-before", Toy(1 << 16).state, saver="thread") as checkpointer:
    checkpointer.save(step=0)
limit_nbytes = address_space_nbytes() + {room_mib} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit_nbytes, limit_nbytes))
with Checkpointer(run, toy.state, saver="{saver}", deadline_s=PATIENCE_S) as checkpointer:
    for _ in range(3):
        toy.save(checkpointer).wait(timeout_s=PATIENCE_S)
    tell(*checkpointer.reports)
"""


@pytest.mark.parametrize("saver", ["process", "thread"])
@pytest.mark.parametrize(("room_mib", "report"), [(80, "0 of 2 slots"), (170, ""), (600, "")])
def test_slots_that_the_system_refuses_are_reported_and_every_step_is_saved(
    run, saver, room_mib, report
):
    """It ended training at its first step, where saves inline would have worked."""
    process = start(SCRIPT.format(room_mib=room_mib, saver=saver), run)
    told, errors = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, errors
    assert committed(run) == [1, 2, 3]
    assert problems(run) == []
    assert report in told if report else told.strip() == "", told
    assert ("SLOTS_REDUCED" in told) == bool(report)
    assert ("inline" in told) == report.startswith("0"), told
