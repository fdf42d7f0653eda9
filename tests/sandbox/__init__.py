"""vLLM with its compile pipeline on and a small model, for the demo and the tests only: see ``plugin``."""
