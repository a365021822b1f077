"""What many of the runtime's tests need: tiny model folders, and the demo model where it has been made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from tests.runtime.folders import OTHER_TEXT, make_model

settings.register_profile("outrider", deadline=None)  # the machine may be busy with others' work
settings.load_profile("outrider")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template. Do not change it."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_draft_dir(tmp_path_factory) -> Path:
    """A draft for it: other weights, one layer less, the same tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-draft", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def foreign_draft_dir(tmp_path_factory) -> Path:
    """No draft for it: another tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "foreign-draft", text=OTHER_TEXT, num_hidden_layers=1)


@pytest.fixture(scope="session")
def demo_models() -> Path:
    """The folder that hack/demo_models.py fills. For tests marked `model`."""
    models = Path(os.environ.get("OUTRIDER_HOME", "~/.cache/outrider")).expanduser() / "models"
    if not (models / "smollm2-135m-instruct-int4").is_dir():
        pytest.skip("hack/demo_models.py has not been run")
    return models


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How often rounding decided between two tokens where losslessness is held in float32."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    found = [dict(report.user_properties) for report in reports if report.when == "call"]
    counts = [each["near ties in float32"] for each in found if "near ties in float32" in each]
    if counts:
        near, tokens = map(sum, zip(*counts, strict=True))
        terminalreporter.write_line(f"losslessness in float32: {near} near ties among {tokens} tokens")
