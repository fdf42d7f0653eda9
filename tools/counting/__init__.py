"""Count and time one layer without an engine: used by tools/ledger.py and tools/host_cost.py."""
