"""The old place of `ckptfmt.adapters.data_loaders`."""

from __future__ import annotations

from ckptfmt.adapters.data_loaders import ConsumedSamples, ForeignLoader

__all__ = ["ConsumedSamples", "ForeignLoader"]
