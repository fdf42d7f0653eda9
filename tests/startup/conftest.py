"""The set-up of the pass tests."""

from tests.support.registered import one_thread as one_thread
