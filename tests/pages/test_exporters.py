"""The exporters of docs/operating.md, with the packages of Prometheus and OpenTelemetry."""

import re
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import Code
from ckptfmt.store.memory import MemoryStore
from tests.house.sources import ROOT
from tests.save.test_failed_saves import FailingStore, Outage


def exporter(name: str) -> Any:
    """Return a function that the page defines."""
    page = (ROOT / "docs/operating.md").read_text("utf-8")
    section = page.partition("## Saves in a monitoring system")[2].partition("\n## ")[0]
    bodies = re.findall(r"^```python no-run\n((?:.*\n)*?)^```$", section, re.MULTILINE)
    names: dict[str, Any] = {}
    exec(next(body for body in bodies if f"def {name}(" in body), names)
    return names[name]


def train(on_save: Any) -> Any:
    """Two committed saves and a failed one."""
    outage = Outage(Code.NO_SPACE, operations=frozenset({"create"}))
    store = FailingStore(MemoryStore(), outage)
    state = ckptfmt.State(weights={"w": np.ones(1000, np.float32)})
    saving = ckptfmt.Saving(saver="thread")
    handle = None
    with ckptfmt.Checkpointer(store, state, saving=saving, on_save=on_save) as checkpointer:
        checkpointer.restore_rng()
        for step in (1, 2, 3):
            outage.is_on = step == 2
            handle = checkpointer.save(step=step)
            assert handle is not None
            handle.wait_over(60)
    return handle


def test_prometheus():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    handle = train(exporter("prometheus_exporter")(registry))

    kinds = {
        kind: registry.get_sample_value("ckptfmt_saves_total", {"kind": kind})
        for kind in ("committed", "failed")
    }
    assert kinds == {"committed": 2, "failed": 1}
    assert registry.get_sample_value("ckptfmt_commit_seconds_count") == 2
    assert registry.get_sample_value("ckptfmt_committed_step") == 3
    assert (
        registry.get_sample_value("ckptfmt_stored_bytes_total") == 2 * handle.report.stored_nbytes
    )
    assert b"ckptfmt_blocked_seconds_total" in prometheus.generate_latest(registry)


def test_opentelemetry():
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    readers = pytest.importorskip("opentelemetry.sdk.metrics.export")
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    exports = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    spans = memory.InMemorySpanExporter()
    reader = readers.InMemoryMetricReader()
    tracers = trace.TracerProvider()
    meters = metrics.MeterProvider(metric_readers=[reader])
    tracers.add_span_processor(exports.SimpleSpanProcessor(spans))
    handle = train(
        exporter("opentelemetry_exporter")(tracers.get_tracer("x"), meters.get_meter("x"))
    )

    told = spans.get_finished_spans()
    assert [(one.name, one.attributes["step"], one.status.is_ok) for one in told] == [
        ("ckptfmt.save", 1, True),
        ("ckptfmt.save", 2, False),
        ("ckptfmt.save", 3, True),
    ]
    assert told[1].status.description == "NO_SPACE"
    assert [event.name for event in told[1].events] == ["exception"]
    assert all(one.end_time >= one.start_time for one in told)
    (metric,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("ckptfmt.stored", "By")
    assert metric.data.data_points[0].value == 2 * handle.report.stored_nbytes
    tracers.shutdown()
    meters.shutdown()
