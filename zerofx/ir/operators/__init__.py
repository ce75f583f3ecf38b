"""What is known of each operator beyond its schema and tags: one table, an entry an operator."""
