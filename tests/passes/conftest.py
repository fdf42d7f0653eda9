"""The plugin's ops and those that only GPU builds of vLLM register; the sandbox itself stays off."""

from tests.support.registered import one_thread as one_thread
