"""The set-up of the pass tests."""

from tests.support.registered import fresh as fresh
