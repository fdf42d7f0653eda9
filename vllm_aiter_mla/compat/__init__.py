"""Every use of vLLM's internals while it serves. Importing this imports no vLLM; ``patches`` changes vLLM."""
