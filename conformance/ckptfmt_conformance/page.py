"""A report as a self-contained page of HTML."""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Sequence
from typing import Final

from ckptfmt_conformance import __version__
from ckptfmt_conformance.badge import badge_svg, said_claim
from ckptfmt_conformance.judge import RED, Status
from ckptfmt_conformance.reports import count_text, group_by_clause
from ckptfmt_conformance.runner import Result, Run

__all__ = ["dump_html"]

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; }
body { margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-top: 1px solid #8884; }
tbody th { padding-top: 1.2rem; }
td.s { font-weight: 600; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; } small { color: #888; }
pre { margin: .2rem 0 0; white-space: pre-wrap; font: 13px ui-monospace, monospace; }
.PASS { color: #2e7d32; } .FAIL, .XPASS { color: #c62828; } .ERROR { color: #8e24aa; }
.XFAIL { color: #8d6e00; } .UNSUPPORTED { color: #00798c; } .SKIPPED { color: #888; }
label { margin-right: 1rem; white-space: nowrap; }
input[type=search] { font: inherit; width: 20rem; max-width: 100%; }
"""

_SCRIPT: Final = """
const groups = [...document.querySelectorAll('tbody')];
function show() {
  const on = new Set([...document.querySelectorAll('input:checked')].map(box => box.value));
  const text = document.querySelector('input[type=search]').value.toLowerCase();
  for (const group of groups) {
    const rows = [...group.querySelectorAll('[data-status]')];
    for (const row of rows)
      row.hidden = !on.has(row.dataset.status) || !row.textContent.toLowerCase().includes(text);
    group.hidden = rows.every(row => row.hidden);
  }
}
document.addEventListener('input', show);
show();
"""


def dump_html(run: Run) -> str:
    """Return the page: the claim, the counts, and all cases by clause with their messages.

    Red cases come first.
    """
    described = run.description
    name = html.escape(f"{described.name} {described.version}")
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.unix_s))
    chosen = (
        f"Only a selection was asked: {html.escape(', '.join(run.selection))}. "
        if run.selection
        else ""
    )
    idle = "".join(
        f"<p class=FAIL>No case fits the line <code>{html.escape(p)}</code> of xfails.</p>"
        for p in run.idle
    )
    boxes = "".join(
        (
            f"<label><input type=checkbox value={status} checked> <span"
            f" class={status}>{status}</span> {count}</label>"
        )
        for status, count in run.counts.items()
        if count
    )
    return f"""<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{name}: conformance</title><style>{_STYLE}</style>
<h1>{name}: conformance to the checkpoint format ckptfmt
{html.escape("/".join(described.spec))}</h1>
<p>{badge_svg(run).strip()}</p>
<p>Claim level: <b>{html.escape(said_claim(run)) or "none"}</b>. {chosen}
Adapter <code>{html.escape(run.adapter)}</code>, suite {__version__},
{len(run.results)} cases in {run.seconds:.1f} s, {when}.</p>
<p><small>Roles: {html.escape(", ".join(described.roles))}.
Kinds: {html.escape(", ".join(described.kinds))}.
Features: {html.escape(", ".join(described.features)) or "none"}.</small></p>{idle}
<p>{boxes}<input type=search placeholder="id, clause, code, ..." aria-label=search></p>
<table><thead><tr><th>Status<th>Case<th>Clauses<th>Seconds</tr></thead>
{"".join(itertools.starmap(_group, group_by_clause(run.results).items()))}</table>
<script>{_SCRIPT}</script></html>
"""


def _group(clause: str, results: Sequence[Result]) -> str:
    head = f"<tr><th colspan=4>{html.escape(clause)} <small>{count_text(results)}</small></tr>"
    return f"<tbody>{head}\n{''.join(map(_row, results))}</tbody>"


def _row(result: Result) -> str:
    case = result.case
    message = f"<pre>{html.escape(result.message)}</pre>" if result.message else ""
    harm = (
        f" <small>{html.escape(case.bug_class)}</small>"
        if result.status in RED | {Status.XFAIL}
        else ""
    )
    return (
        f'<tr data-status={result.status}><td class="s {result.status}">{result.status}'
        f"<td><code>{html.escape(case.id)}</code>{harm}<br>{html.escape(case.description)}{message}"
        f"<td><code>{html.escape(' '.join(case.requirements))}</code><td"
        f" class=n>{result.seconds:.2f}</tr>\n"
    )
