"""Staging memory: slots shared by trainer and saver, and helper processes with their channels."""
