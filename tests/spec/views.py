"""The JSON view of the msgpack documents: byte strings as lower-case hex, everything else as it is."""

from conformance.generate.views import document_of, load_schema

__all__ = ["document_of", "load_schema", "view_of"]


def view_of(value):
    """The JSON view of a msgpack document's signed map."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: view_of(member) for key, member in value.items()}
    return [view_of(member) for member in value] if isinstance(value, list) else value
