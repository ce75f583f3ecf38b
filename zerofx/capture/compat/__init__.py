"""What torch's fake tensors and decompositions get wrong, and what is done about it."""
