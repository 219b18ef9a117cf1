"""How live objects are called in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptfmt.errors import CkptError, Code, err

#: The scope of what is the same on all workers, or in pieces on them.
GLOBAL = "global"


def worker_scope(worker: int) -> str:
    """Return the scope of what belongs to one worker alone."""
    return f"lw/{worker}"


def key_text(key: object) -> str:
    """Return how a key of a mapping stands in a name: ``~`` and ``/`` escaped as in a JSON pointer.

    >>> key_text("a/b~c"), key_text(3)
    ('a~1b~0c', '3')
    """
    if type(key) is str and "~" not in key and "/" not in key:
        return key
    try:
        text = key if isinstance(key, str) else repr(key)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits.
        text = f"({type(key).__name__})"
    return text.replace("~", "~0").replace("/", "~1")


def join_name(path: Iterable[object]) -> str:
    """Return the name of what lies at `path`, a sequence of keys.

    >>> join_name(["extra", "ema", "layers.0.weight"])
    'extra/ema/layers.0.weight'
    """
    return "/".join(key_text(key) for key in path)


def prefix_of(path: Iterable[object]) -> str:
    """Return what stands before the names of everything beneath `path`.

    >>> prefix_of([]), prefix_of(["gen"])
    ('', 'gen/')
    """
    name = join_name(path)
    return f"{name}/" if name else ""


def check_unique(keys: Iterable[tuple[str, str, str]], what: str) -> None:
    """Check that nothing has the same field, name and scope. Raises: StateError(STATE_NAME)."""
    keys = list(keys)
    if len(set(keys)) < len(keys):
        raise _name_error(next(key for key, count in Counter(keys).items() if count > 1), what)


def _name_error(key: tuple[str, str, str], what: str) -> CkptError:
    field, name, scope = key
    return err(Code.STATE_NAME, f"two {what} of {field} are called {name!r} in scope {scope}", where=f"{field}:{name}")
