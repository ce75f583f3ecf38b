"""The life of a step: batches, shapes, states, closing."""
