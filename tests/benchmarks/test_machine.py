"""What the benchmarks do to the machine that they measure on."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from benchmarks.machine import own_processor


def test_a_thread_has_a_processor_that_no_thread_or_process_beside_it_has() -> None:
    processors = os.sched_getaffinity(0)
    if len(processors) < 2:
        pytest.skip("one processor")
    over = threading.Event()
    beside = [threading.Thread(target=over.wait) for _ in range(2)]
    beside[0].start()
    child = subprocess.Popen(["sleep", "60"])
    try:
        with own_processor() as keep_apart:
            beside[1].start()
            keep_apart()
            own = os.sched_getaffinity(0)
            assert len(own) == 1
            for one in (beside[0].native_id, beside[1].native_id, child.pid):
                assert os.sched_getaffinity(one or 0) == processors - own
        for one in (0, beside[0].native_id, beside[1].native_id, child.pid):
            assert os.sched_getaffinity(one or 0) == processors
    finally:
        over.set()
        child.kill()
        child.wait()
