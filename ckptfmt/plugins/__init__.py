"""Plug-ins for training frameworks: a module for each, which imports its framework and public names of ckptfmt."""
