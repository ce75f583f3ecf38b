"""Build one graph of forward and backward from a model, a batch and a loss."""
