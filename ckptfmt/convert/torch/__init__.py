"""Targets of a conversion that torch itself writes."""
