"""A batch before its step runs: joined from micro-batches, padded to a rung of ``lengths=``, compared among ranks."""
