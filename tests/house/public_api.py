"""The public interface as text: each name with its signature. ``python -m tests.house.public_api`` writes the list.

The list is frozen for 1.x. A line may be added, and a parameter with a default may be added at the
end of a line. A removed or changed line breaks programs: give the name a DeprecationWarning first,
and remove it with the next major version.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

import ckptfmt
from tests.house.sources import ROOT

LIST: Final = ROOT / "tests" / "house" / "public_api.txt"
#: Members for other modules of the package, which may change in any version.
UNPROMISED: Final = {
    "Checkpoint": frozenset(
        {
            "check_current", "check_file", "check_nbytes", "iter_content", "metadata_nbytes",
            "open_part", "open_parts", "pending", "place_of", "plan_reading", "read_header",
            "read_part", "stored_box", "stored_leaf", "stored_stream", "while_current",
        }
    )
}  # fmt: skip


def list_interface() -> list[str]:
    """Return a line for each public name of ``ckptfmt``, and for each public member of a class."""
    return [line for name in sorted(ckptfmt.__all__) for line in _lines(name)]


def _lines(name: str) -> Iterator[str]:
    value = getattr(ckptfmt, name)
    if not inspect.isclass(value):
        yield f"{name}{_signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases}){_signature(value)}"
    for member in sorted(dir(value)):
        found = inspect.getattr_static(value, member)
        is_promised = member not in UNPROMISED.get(name, ())
        if member.startswith("_") or not is_promised or not _is_own(value, member):
            continue
        inner = getattr(found, "__func__", found)
        kind = "" if inner is found else f"{type(found).__name__} "
        yield f"  {kind}{name}.{member}" + (_signature(inner) if callable(inner) else "")


def _is_own(value: type, member: str) -> bool:
    """Return whether a member is defined by a class of this package, and not by an inherited one."""
    owner = next(base for base in value.__mro__ if member in vars(base))
    return owner.__module__.startswith("ckptfmt")


def _signature(value: object) -> str:
    """Return the parameters with their kinds and defaults, without annotations."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


if __name__ == "__main__":
    LIST.write_text("\n".join(list_interface()) + "\n", "utf-8")
