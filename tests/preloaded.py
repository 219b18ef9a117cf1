"""The last module that the server of forks imports: forks collect no garbage among what it imported.

A full collection in a fork would visit half a million objects, and copy the memory that it shares
with the server.
"""

import gc

from ckptfmt.adapters import context

context.provenance(None, None)  # reads the list of installed packages
gc.collect()
gc.freeze()
