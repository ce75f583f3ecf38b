"""The plan: plain data, every decision with its reason."""
