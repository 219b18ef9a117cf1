"""Imports that the process from which tests fork their trainings makes once."""

from ckptfmt import checkpointer  # noqa: F401 - what a training imports
from ckptfmt.adapters import context
from ckptfmt.loading import restore  # noqa: F401 - as above
from ckptfmt.saving import background  # noqa: F401 - as above

context.provenance(None, None)  # reads the list of installed packages
