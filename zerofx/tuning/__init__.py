"""Plans compared by running them."""
