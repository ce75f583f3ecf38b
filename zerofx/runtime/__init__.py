"""The runtime that an emitted step calls: collectives, state, the optimizer's scalars, agreement between ranks."""
