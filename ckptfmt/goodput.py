"""The old place of `ckptfmt.loop.interval`, which docs/goodput.md named until 0.10.

`ckptfmt.goodput.interval` is an alias until 2.0.
"""

from __future__ import annotations

import sys

from ckptfmt.loop import interval

sys.modules[f"{__name__}.interval"] = interval
