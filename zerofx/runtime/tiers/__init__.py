"""Host memory and NVMe, and copies to and from them."""
