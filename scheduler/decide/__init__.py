"""The decisions of a plan, one kind a file."""
