"""The HTTP process stays light: no torch, no transformers, and starting the engine waits for nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _imported_by(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has imported after `statement`."""
    code = f"import sys; sys.path[:0] = ['runtime']; {statement}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    return set(done.stdout.split())


def test_the_package_itself_imports_nothing():
    assert _imported_by("import outrider_runtime").isdisjoint(
        {"torch", "numpy", "tokenizers", "outrider_runtime.engine"}
    )
    imported = _imported_by("from outrider_runtime import SamplingParams")
    assert "outrider_runtime.sampling.params" in imported
    assert imported.isdisjoint({"torch", "numpy"})


@pytest.mark.parametrize("module", ["server.lifecycle", "engine.client", "flags", "metrics", "__main__"])
def test_the_http_process_does_not_import(module):
    imported = _imported_by(f"import outrider_runtime.{module}")
    assert f"outrider_runtime.{module}" in imported
    assert imported.isdisjoint({"torch", "transformers", "numpy", "safetensors"})


def test_the_engine_is_started_before_the_web_server_is_imported():
    assert _imported_by("import outrider_runtime.__main__").isdisjoint({"aiohttp", "pydantic", "jinja2", "tokenizers"})
