"""What a rewritten graph calls. The ops do not know who emits them."""
