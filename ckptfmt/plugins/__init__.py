"""Plug-ins for training frameworks: each module imports one framework and ckptfmt's public API."""
