"""The objective of a step: the call of a model, its loss, the weight of a loss, an evaluation."""
