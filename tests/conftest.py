"""Fixtures shared by the tests, and single-threaded torch.

Two test processes with two spinning OpenMP threads each on two cores run 20 times slower than
with one; tests measure no time, so one thread costs nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Folder of the converted bundled model."""
    from speculant.target.load import resolve

    return resolve("smollm2-135m-instruct")[0]
