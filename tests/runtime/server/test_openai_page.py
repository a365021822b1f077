"""docs/openai.md names every field that requests may have, and no other; and codes that the server has."""

from __future__ import annotations

import re
from pathlib import Path

from outrider_runtime.server.fields import UNSUPPORTED
from outrider_runtime.server.openai import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "openai.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str, column: int = 1) -> set[str]:
    rows = [line.split("|")[column] for line in text.splitlines() if line.startswith("|")]
    return {word for cell in rows for word in re.findall(r"`(\w+)`", cell)}


def test_the_fields_of_both_endpoints_are_told():
    assert first_cells(section("Fields")) == set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)


def test_what_is_said_to_be_unsupported_is_refused():
    words = set(re.findall(r"`(\w+)`", section("Fields").split("|")[0]))
    assert words <= set(UNSUPPORTED)


def test_codes_of_errors_are_the_servers():
    server = ROOT / "runtime" / "outrider_runtime" / "server"
    source = "".join(file.read_text() for file in server.glob("*.py"))
    codes = first_cells(section("Errors"), 2)
    assert len(codes) > 9
    assert [code for code in codes if f'"{code}"' not in source] == []
