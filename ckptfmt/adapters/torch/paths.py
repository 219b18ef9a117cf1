"""Names of what a module holds: paths of attributes in which wrappers don't show."""

from __future__ import annotations

import sys
from typing import Final

import torch

#: Wrappers by module and class, each with the attribute that holds what it wraps.
_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
#: Attribute of a wrapper that takes it out of the keys of a state_dict by itself.
_TAKEN_OUT: Final = "_checkpoint_wrapped_module"


class Paths:
    """The paths within one module, for one look at it.

    Where nothing is wrapped, which is most often so, a path is a name as it is.

    Args:
        root: where paths begin; wrapped or not.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        loaded = ((getattr(sys.modules.get(module), name, None), attribute) for module, name, attribute in _WRAPPERS)
        self._wrappers = [(kind, attribute) for kind, attribute in loaded if kind is not None]
        self._attributes: dict[type, str | None] = {}
        self._wraps = any(self._attribute(module) is not None for module in _all_modules(root))

    def name_of(self, path: str, *, raw: bool) -> str:
        """Return the name of what `path` leads to.

        Args:
            path: of attributes.
            raw: as modules have it; else a key of a state_dict, which some wrappers have left already.
        """
        return self._walk(path, raw=raw)[1] if self._wraps else path

    def holder_of(self, key: str) -> torch.nn.Module | None:
        """Return the module that holds what a state_dict has under `key`, wrapped by nothing."""
        return self._walk(key, raw=False)[0]

    def _walk(self, path: str, *, raw: bool) -> tuple[torch.nn.Module | None, str]:
        holder: torch.nn.Module | None = None
        module: torch.nn.Module | None = self._root
        names = []
        for part in path.split("."):
            attribute = self._attribute(module)
            if module is not None and attribute == part and (raw or attribute != _TAKEN_OUT):
                module = module._modules.get(part)  # noqa: SLF001 - get_submodule would run the wrapper's __getattr__
                continue
            while module is not None and attribute is not None:
                module = module._modules.get(attribute)  # noqa: SLF001
                attribute = self._attribute(module)
            holder = module
            names.append(part)
            module = None if module is None else module._modules.get(part)  # noqa: SLF001
        return holder, ".".join(names)

    def _attribute(self, module: torch.nn.Module | None) -> str | None:
        """Return the attribute under which a wrapper holds what it wraps; None for what is no wrapper."""
        kind = type(module)
        if kind not in self._attributes:
            found = (attribute for wrapper, attribute in self._wrappers if isinstance(module, wrapper))
            self._attributes[kind] = next(found, None)
        return self._attributes[kind]


def _all_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that paths can lead to, by whichever way `modules` of one of them may go."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        parts = waiting.pop()._modules.values()  # noqa: SLF001
        new = [part for part in parts if part is not None and id(part) not in found]
        found |= {id(part): part for part in new}
        waiting += new
    return list(found.values())
