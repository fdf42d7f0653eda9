"""What ran on the fast path in this process, what did not, and why: counted by the ops, written after warm-up."""
