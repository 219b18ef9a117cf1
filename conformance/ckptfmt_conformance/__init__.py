"""The conformance suite of the checkpoint format ckptfmt: any reader or writer, in any language, can be judged by it.

``python -m ckptfmt_conformance run --adapter ...`` runs it; so does ``python -m ckptfmt conformance``, where ckptfmt is
installed, and ``pytest -p ckptfmt_conformance.plugin --pyargs ckptfmt_conformance --adapter ...``.

Nothing in here imports an implementation, but for the adapters.
"""

from __future__ import annotations

__version__ = "0.9.0"

__all__ = ["__version__"]
