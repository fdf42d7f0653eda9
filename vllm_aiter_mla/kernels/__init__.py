"""Kernel back ends: tensors in, tensors out. Nothing here imports vLLM.

``inputs`` is what a call brings, ``shape`` what a layer is and synthetic calls of it, ``platform`` the table of cards,
``absorb`` the forms of the weight W_UK. ``backend`` is what every back end answers: ``aiter``, ``triton`` and
``reference_backend`` here, vLLM's own kernels from above. ``select`` chooses one per call shape and remembers it;
``selfcheck`` compares one with ``reference``, in the steps of ``compare``; ``capture`` tells whether a graph is being
recorded.
"""
