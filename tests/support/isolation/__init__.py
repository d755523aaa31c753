"""What one caller sends is of no concern to another: requests byte by byte, and a model in every way to serve it."""
