"""Capture for a GPU that is not here: what it would be asked to run, traced on a CPU's fake tensors."""
