"""jaxlightning.loops."""
