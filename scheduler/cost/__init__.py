"""What a plan costs: bytes over time, seconds, on a machine that need not exist."""
