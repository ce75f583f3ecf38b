"""Compare plans by running them."""
