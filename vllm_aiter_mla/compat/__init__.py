"""Every touch of a vLLM internal. ``patches.PATCHES`` is the table; importing this package imports no vLLM."""
