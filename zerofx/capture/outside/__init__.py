"""What a step uses besides its model and batch: tensors elsewhere, and models of other steps."""
