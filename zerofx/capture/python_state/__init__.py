"""Python state that a forward reads: the code that runs in a trace, the names in it, and their values since then."""
