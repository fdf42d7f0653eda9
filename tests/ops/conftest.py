"""The set-up of the pass tests."""

from passes.conftest import fresh as fresh
