"""Tensors that a step uses besides its model and batch: free tensors, and models of other steps."""
