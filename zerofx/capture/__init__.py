"""From a model, a batch and a loss to one graph of forward and backward."""
