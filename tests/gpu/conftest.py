"""What tests on a CUDA device share."""

import pytest
import torch


@pytest.fixture
def exact_products():
    """No TF32. By hand: monkeypatch would delete the setting instead of putting it back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
