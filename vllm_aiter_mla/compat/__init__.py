"""Every touch of a vLLM internal. Importing this package imports no vLLM; ``patches`` holds what is changed in vLLM."""
