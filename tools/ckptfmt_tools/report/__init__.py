"""The command ``report``: facts on a run, drawings, the HTML page, divergence from a run."""
