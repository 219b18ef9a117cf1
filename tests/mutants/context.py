"""Mutants of the context: what surrounds the tensors, whose it is, and where the run stands in its data."""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

from ckptfmt.adapters import capture
from ckptfmt.adapters import live as walk
from ckptfmt.adapters import rng_streams as streams
from ckptfmt.adapters.live_trees import GLOBAL
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.adapters.torch import loaders
from ckptfmt.data import sampler
from ckptfmt.data.course import Course
from ckptfmt.data.sampler import Sampler
from ckptfmt.data.tickets import Tickets
from ckptfmt.loading import restore
from tests.mutants.mutant import Mutant, replaced


def _without_extra(
    right: Any, self: object, field: str, path: tuple[object, ...], *rest: Any
) -> Any:
    return right(self, field, path[1:] if path[:1] == ("extra",) else path, *rest)


def _count_what_was_fetched(right: Any, self: Sampler) -> None:
    """Count as many samples as were consumed, so that nothing else notices."""
    ahead = max(0, self._position_of(self._progress.steps_fetched) - self.position)
    ledger = Course.ledger
    with mock.patch.object(
        Course, "ledger", lambda course, begin, end: ledger(course, begin + ahead, end + ahead)
    ):
        right(self)


def _without_a_word(right: Any, plan: LoadPlan, *arguments: Any, **options: Any) -> Any:
    actions = right(plan, *arguments, **options)
    plan.downgrades = [line for line in plan.downgrades if not line.startswith("STREAM_")]
    return actions


def _steps_for_positions(right: Any, self: Sampler, **skip: Any) -> None:
    with mock.patch.object(Sampler, "position", property(lambda self: self.steps_done)):
        right(self, **skip)


def _at_once(right: Any, self: Tickets, tickets: Any) -> None:
    right(self, tickets)
    self.commit()


def _without_the_late(right: Any, shares: Any, *others: Any) -> Any:
    """Take positions that a slow worker hasn't issued for consumed ones."""
    shares = list(shares)
    top = max(share.top for share in shares)
    return right([dataclasses.replace(share, next=top) for share in shares], *others)


MUTANTS = {
    "extra_among_the_optimizers": Mutant(
        clauses=("REQ-CTX-002",),
        fault="saves extra state under names of optimizers' own",
        patch=replaced(walk._Walker, "units", _without_extra),
        tests=(
            "interface/test_api.py::test_extra_lies_in_the_field_optimizer_under_names_of_its_own",
        ),
    ),
    "generators_of_nobody": Mutant(
        clauses=("REQ-CTX-003",),
        fault="saves each worker's generators as if they were everybody's",
        patch=replaced(streams, "worker_scope", lambda *_: GLOBAL),
        tests=("adapters/test_streams.py::test_the_callers_generators_go_on[python]",),
    ),
    "streams_left_out_in_silence": Mutant(
        clauses=("REQ-CTX-004",),
        fault="leaves out streams of workers that aren't there, and says nothing",
        patch=replaced(restore, "plan_streams", _without_a_word),
        tests=("adapters/test_streams.py::test_another_number_of_workers_is_refused_or_reported",),
    ),
    "other_scopes_taken_in_silence": Mutant(
        clauses=("REQ-CTX-004",),
        fault="gives a worker what another one had, and says nothing",
        patch=replaced(LoadPlan, "_report_scope", lambda *_: None),
        tests=("adapters/test_modules.py::test_per_worker_modules_and_a_load_by_fewer_and_more",),
    ),
    "whole_environment": Mutant(
        clauses=("REQ-CTX-005",),
        fault="saves all variables of the environment",
        patch=replaced(
            capture,
            "local_facts",
            lambda right, *given: {**right(*given), "env": dict(os.environ)},
        ),
        tests=("save/test_capture.py::test_provenance_says_where_the_run_comes_from",),
    ),
    "ledger_of_what_was_fetched": Mutant(
        clauses=("REQ-CUR-008",),
        fault="counts those samples that were fetched last",
        patch=replaced(Sampler, "_count", _count_what_was_fetched),
        tests=("data/test_sampler.py::test_the_ledger_is_that_of_the_samples_seen",),
    ),
    "any_order_of_an_epoch": Mutant(
        clauses=("REQ-EPO-003",),
        fault="goes on with the order that the samplers give now",
        patch=replaced(loaders, "_index_bytes", lambda *_: None),
        tests=("adapters/test_followed_loaders.py::test_an_order_of_another_epoch_is_refused",),
    ),
    "skips_of_what_was_consumed": Mutant(
        clauses=("REQ-CUR-020",),
        fault="takes a number of steps for the position that a skip may begin at",
        patch=replaced(Sampler, "skip", _steps_for_positions),
        tests=(
            "data/test_sampler_orders.py::test_a_skip_that_cannot_be_is_refused_and_nothing_changes[options6]",
        ),
    ),
    "positions_of_slow_workers": Mutant(
        clauses=("REQ-PIP-003",),
        fault="leaves out positions below the end of the issued ones that no worker has issued",
        patch=replaced(sampler, "merge_shares", _without_the_late),
        tests=("data/test_tickets.py::test_a_worker_that_is_slower_leaves_its_positions_open",),
    ),
    "consumed_before_the_step_is_done": Mutant(
        clauses=("REQ-PIP-003",),
        fault="drops samples of a step that isn't finished from the open ones",
        patch=replaced(Tickets, "consume", _at_once),
        tests=(
            "data/test_tickets.py::test_a_ticket_is_consumed_once_its_step_is_counted_and_no_earlier",
        ),
    ),
    "stages_of_what_was_consumed": Mutant(
        clauses=("REQ-CUR-020",),
        fault="goes on with other stages in the place of those that have begun",
        patch=replaced(sampler, "_begun", lambda right, mixture, _: right(mixture, 0)),
        tests=(
            "data/test_sampler_orders.py::test_a_cursor_of_another_mixture_is_refused[options4]",
            "data/test_sampler_orders.py::test_a_cursor_of_another_mixture_is_refused[options5]",
        ),
    ),
}
