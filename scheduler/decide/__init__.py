"""One kind of decision a file."""
