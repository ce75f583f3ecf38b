"""What a batch becomes before its step runs: joined from micro-batches, padded to a rung of ``lengths=``."""
