"""The table of operators: facts beyond their schemas and tags, an entry an operator."""
