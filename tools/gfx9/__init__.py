"""An interpreter of gfx942 and gfx950 machine code: it runs the compiled Triton kernels on a CPU, lane by lane.

It says what the code does and what it touches, never how long a card takes. ``tools/gfx9/README.md`` lists what is
modelled, what is assumed what is refused, and which file does what.
"""
