"""The lineage of a run as a narrow column of characters, newest first. Pure.

Each launch is a line of checkpoints; it leaves the line of the launch that it resumed from at the checkpoint that it
resumed from. ``*`` is a checkpoint that the newest launch goes back to, ``o`` another committed one, ``x`` one that was
given up or never finished, ``-`` a retired one, ``!`` one that can't be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def draw_graph(nodes: Sequence[tuple[str, str | None, str]]) -> list[list[str]]:
    """Return, for each node, the lines that stand before its text: the last of them is the node's own.

    Args:
        nodes: name, parent's name (None for a root) and mark; each parent stands after its children.

    >>> for lines in draw_graph([("d", "a", "*"), ("c", "b", "o"), ("b", "a", "o"), ("a", None, "*")]):
    ...     print(lines)
    ['*']
    ['| o']
    ['| o']
    ['|/', '*']
    """
    names = {name for name, _, _ in nodes}
    lanes: list[str] = []  # each the name of the node that the lane leads to
    drawn = []
    for name, parent, mark in nodes:
        lines = []
        while lanes.count(name) > 1:
            lines.append(_merge(lanes, name))
        if name not in lanes:
            lanes.append(name)
        lane = lanes.index(name)
        lines.append(" ".join(mark if number == lane else "|" for number in range(len(lanes))))
        if parent in names and parent is not None:
            lanes[lane] = parent
        else:
            del lanes[lane]
        names.discard(name)
        drawn.append(lines)
    return drawn


def _merge(lanes: list[str], name: str) -> str:
    """Let the last lane that leads to `name` run into the one before that does; return the line that shows it.

    Lane i stands in column 2i. What lies between is crossed; what lies to the right moves up.
    """
    target, last = [number for number, leads_to in enumerate(lanes) if leads_to == name][-2:]
    line = [" "] * (2 * len(lanes))
    for number in range(len(lanes)):
        if number < last:
            line[2 * number] = "|"
            line[2 * number + 1] = "_" if target <= number < last - 1 else " "
        else:
            line[2 * number - 1] = "/"
    del lanes[last]
    return "".join(line).rstrip()
