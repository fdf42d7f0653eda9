"""Every touch of a vLLM internal. ``register.PATCHES`` is the table; importing this package imports no vLLM."""
