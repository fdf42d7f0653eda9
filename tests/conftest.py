"""What holds for every test: property tests check claims, not how fast the machine is that runs them."""

from hypothesis import settings

# A deadline of milliseconds fails on a machine that other work shares, on the first call of torch above all.
settings.register_profile("claims", deadline=None, print_blob=True)
settings.load_profile("claims")
