"""Injection of faults into a live training job under torchrun on this machine.

``python -m ckptfmt_conformance chaos --adapter COMMAND`` trains, injects a fault, waits until
training goes on, and repeats. Afterwards each checkpoint is compared with an undisturbed training
of the same job.
"""
