"""The Python state that a forward reads: which code runs in a trace, what that names, and whether it is as it was."""
