"""Tools around checkpoints of `ckptfmt`: conversions, comparisons, reports, rehearsals, the demo.

The distribution `ckptfmt-tools`, which the extra ``ckptfmt[tools]`` installs. `ckptfmt.__main__`
runs the commands by `ckptfmt_tools.handover`.
"""

__version__ = "1.0.0rc1"
