"""AMD's AITER as a kernel back end.

``locate`` finds it without importing it, ``module`` imports it, ``contract`` says what it must never be given,
``dispatch`` which of its kernels will run, ``tables`` holds the cos and sin halves it reads, ``backend`` calls it.
docs/aiter.md tells the whole.

Nothing is imported here: `doctor` runs ``locate`` where there is no torch.
"""
