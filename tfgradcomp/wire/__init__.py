"""Words on the wire."""
