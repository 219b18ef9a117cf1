"""Match saved RNG streams of devices to live RNG streams of devices, by names alone.

A stream of a device is the default generator of the device. Its name has a number, as in
``torch.cuda/0``: the place of the device among the devices of the state, in the order of their
indices. The checkpoint doesn't record the indices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final

from ckptfmt.errors import Code

#: The names of streams of devices. The host's stream is ``torch.cpu``.
_NAME: Final = re.compile(r"torch\.[a-z0-9_]+/[0-9]+")
_EFFECT: Final = "dropout and other random draws of the model differ from an uninterrupted run"


def is_of_device(name: str) -> bool:
    """Return whether a stream is the default generator of a device.

    >>> is_of_device("torch.cuda/0"), is_of_device("torch.cpu"), is_of_device("user/torch.cuda/0")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMatch:
    """The saved streams for the live streams of devices, and the difference if there is any.

    Attributes:
        saved_names: the saved name for each live name with a counterpart.
        code: the code of the difference; None if saved and live streams have the same names.
        names: the names of the differing streams.
        detail: the difference, for people.
        outcome: the treatment of the streams, and the effect on later draws, for people.
    """

    saved_names: Mapping[str, str]
    code: Code | None = None
    names: tuple[str, ...] = ()
    detail: str = ""
    outcome: str = ""


def match_devices(
    saved: Iterable[str], live: Mapping[str, str], current: str | None
) -> DeviceMatch:
    """Return the match of saved streams of devices to live streams of devices.

    Equal names match. Version 0.10 gave a number to the current device, too. If such numbers of the
    devices in use here have the saved count, and the state lies on fewer devices, the saved numbers
    are read in this way: the launch is likely to be as the launch before the update.

    Args:
        saved: the names of the saved streams of devices.
        live: the device of each live stream of a device, such as ``cuda:3``, by the stream's name.
        current: the current CUDA device; None if CUDA isn't initialised.

    >>> match_devices(["torch.cuda/0"], {"torch.cuda/0": "cuda:3"}, "cuda:0").code is None
    True
    >>> old = ["torch.cuda/0", "torch.cuda/1"]
    >>> match_devices(old, {"torch.cuda/0": "cuda:3"}, "cuda:0").saved_names
    {'torch.cuda/0': 'torch.cuda/1'}
    """
    # Numbers have no leading zeros, so a shorter name has a smaller number.
    kept = tuple(sorted(saved, key=lambda name: (len(name), name)))
    taken = {name: name for name in live if name in kept}
    if len(taken) == len(kept) == len(live):
        return DeviceMatch(saved_names=taken)
    if not kept:
        return DeviceMatch(
            saved_names={},
            code=Code.STREAM_MISSING,
            names=tuple(live),
            detail="no RNG stream of a device was saved",
            outcome=f"{_describe_kept(live.values())}, so that {_EFFECT}",
        )
    if not live:
        return DeviceMatch(
            saved_names={},
            code=Code.STREAM_UNEXPECTED,
            names=kept,
            detail=f"no {_kinds(kept)} device is in use here",
            outcome=f"the saved state is left out, so that {_EFFECT}",
        )
    told = "the checkpoint doesn't record the device of a number"
    numbered = _number(live.values(), current)
    if len(live) < len(numbered) == len(kept):
        taken = {name: numbered[device] for name, device in live.items()}
        taken = {name: place for name, place in taken.items() if place in kept}
        told += f", and the numbers are read as version 0.10 counts, {current} included"
    elif len(live) < len(kept):
        told += ", and version 0.10 also counted the current device"
    parts = [told, *(f"{place} is put into {live[name]}" for name, place in taken.items())]
    left = [name for name in kept if name not in taken.values()]
    parts += [f"{name} is left out" for name in left]
    fresh = [device for name, device in live.items() if name not in taken]
    here = [f"{name} ({device})" for name, device in live.items()]
    parts += [_describe_kept(fresh)] if fresh else []
    return DeviceMatch(
        saved_names=taken,
        code=Code.STREAM_UNEXPECTED if left else Code.STREAM_MISSING,
        names=kept,
        detail=f"saved {', '.join(kept)}, here {', '.join(here)}",
        outcome=f"{'; '.join(parts)}; perhaps {_EFFECT}",
    )


def _number(devices: Iterable[str], current: str | None) -> dict[str, str]:
    """Return the name that version 0.10 gives to the stream of each device in use."""
    used = {*devices} if current is None else {*devices, current}
    ordered = sorted(used, key=lambda device: (len(device), device))
    return {device: f"torch.cuda/{number}" for number, device in enumerate(ordered)}


def _kinds(names: Iterable[str]) -> str:
    """Return the types of the devices of some streams.

    >>> _kinds(["torch.cuda/0", "torch.cuda/1"])
    'cuda'
    """
    kinds = {name.removeprefix("torch.").partition("/")[0] for name in names}
    return " or ".join(sorted(kinds))


def _describe_kept(devices: Iterable[str]) -> str:
    """Return a clause on devices with generators that a load leaves unchanged.

    >>> _describe_kept(["cuda:3"]), _describe_kept(["cuda:0", "cuda:1"])
    ('the generator of cuda:3 keeps its own state', 'the generators of cuda:0, cuda:1 keep their \
own states')
    """
    names = list(devices)
    return (
        f"the generator of {names[0]} keeps its own state"
        if len(names) == 1
        else f"the generators of {', '.join(names)} keep their own states"
    )
