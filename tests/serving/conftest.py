"""The set-up of the pass tests."""

from tests.passes.conftest import fresh as fresh
