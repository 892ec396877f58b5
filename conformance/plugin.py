"""pytest entry point of the conformance suite; light to import."""
