"""Faults on purpose: a campaign against a live training job of the caller's own, under torchrun, on this machine.

``python -m ckptfmt_conformance chaos --adapter COMMAND`` trains, breaks something, waits until training goes on, and
does that again. Afterwards each checkpoint is compared with an undisturbed training of the same job.
"""
