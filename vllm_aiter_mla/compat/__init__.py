"""Every use of vLLM's code. Importing this package imports no vLLM; ``patches`` holds what is changed in vLLM."""
