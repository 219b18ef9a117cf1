"""Commands of `ckptfmt` that this distribution brings: one module for each, or for a few alike."""
