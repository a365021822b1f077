"""What all tests here need."""

import pytest
import torch

from outrider_runtime.kernels.limits import hopper

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here; hack/gpu_check.sh runs these on one"
    ),
]
ON_HOPPER = pytest.mark.skipif(torch.cuda.is_available() and not hopper(torch.device("cuda")), reason="for Hopper")
