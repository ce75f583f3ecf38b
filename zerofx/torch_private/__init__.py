"""Private torch APIs, and everything that uses them: one place to look at when torch changes."""
