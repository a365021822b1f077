"""What all tests here need."""

import pytest
import torch

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here; hack/gpu_check.sh runs these on one"
    ),
]
