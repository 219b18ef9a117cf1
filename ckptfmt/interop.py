"""The old place of `ckptfmt.adapters.data_loaders`, which README named until 0.9.

`ckptfmt.interop.loaders` is an alias until 2.0.
"""

from __future__ import annotations

import sys

from ckptfmt.adapters import data_loaders as loaders

sys.modules[f"{__name__}.loaders"] = loaders
