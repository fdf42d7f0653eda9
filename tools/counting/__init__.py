"""What `tools/ledger.py` counts with: the launches, allocations and bytes of a layer."""
