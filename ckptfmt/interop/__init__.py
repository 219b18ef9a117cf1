"""The old place of `ckptfmt.adapters`: what README named there is still found there."""
