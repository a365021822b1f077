"""Kernels run through Triton's interpreter here, which must be chosen before their first import."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
