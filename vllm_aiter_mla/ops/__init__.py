"""The ops that a rewritten graph calls."""
