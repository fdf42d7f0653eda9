"""One command for a bare NVIDIA card; ``__main__`` says how to run it."""
