"""Count and time one layer without an engine, and the start of one: for docs.py, host_cost.py and start_cost.py."""
