"""An interpreter of gfx942 and gfx950 machine code: it runs the compiled Triton kernels on a CPU, lane by lane.

It says what the code does and what it touches, never how long a card takes. ``tools/gfx9/README.md`` lists what is
modelled, what is assumed and what is refused.

code        the code object: its text proved equal to its bytes, its kernel descriptor and arguments
parse       one line of assembly to one instruction
operand     registers, constants and their types: how an instruction reads and writes
wave        the state of one wave; what is undefined or in flight
memory, lds the buffers of a launch and the LDS of a workgroup; what they count
scalar, vector, matrix, numbers   semantics by opcode, as the ISA manual lists them
access      loads and stores
machine     instructions to closures, waves to a workgroup, workgroups to a launch
cases       the kernel's variants, their operands and the comparison with the reference
"""
