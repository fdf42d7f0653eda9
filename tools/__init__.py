"""What is not shipped: run from the root of a checkout, as `python tools/NAME.py` or `python -m tools.NAME`."""
