"""A fixture for tests whose tensors are tiny."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for one another on a machine of few cores cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
