"""What is private in torch, and all that uses it: one place to look at when torch changes."""
