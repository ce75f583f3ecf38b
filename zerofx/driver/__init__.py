"""From a batch to a step that all ranks agree on."""
