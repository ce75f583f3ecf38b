"""What the operators of our own compute."""
