"""The search for the fastest plan within a memory budget."""
