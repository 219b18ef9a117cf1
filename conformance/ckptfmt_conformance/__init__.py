"""The conformance suite of the checkpoint format ckptfmt, for readers and writers in any language.

``python -m ckptfmt_conformance run --adapter ...`` runs the suite. Where ckptfmt is installed,
``python -m ckptfmt conformance`` runs the suite too. Under pytest, use ``pytest -p
ckptfmt_conformance.plugin --pyargs ckptfmt_conformance --adapter ...``.

Only the adapters import an implementation of the format. The rest of the package imports none.
"""

from __future__ import annotations

__version__ = "1.0.0rc1"

__all__ = ["__version__"]
