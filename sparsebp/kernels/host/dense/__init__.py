"""Dense products on the host."""
