"""What a step computes of a batch: the call of a model, its loss, the weight of a loss, an evaluation."""
