"""`outrider check`: whether a configuration would be served, said before any accelerator is asked for."""

from __future__ import annotations

from collections.abc import Callable

from outrider_runtime.config import EngineConfig
from outrider_runtime.errors import EXIT_CODES, Refusal
from outrider_runtime.models.preflight import preflight
from outrider_runtime.server.chat import load_chat_template
from outrider_runtime.server.tokenizer import Tokenizer


def run_check(config: EngineConfig, say: Callable[[str], None]) -> int:
    """One line to `say` for each check, the refusal last. Returns the exit code: 0, or the reason's.

    A draft that serving would go on without is a failure here: the question was whether the two fit.
    """
    try:
        ready = preflight(config, say, passed=lambda line: say(f"ok       {line}"))
        folder, draft = ready.target.checkpoint.tokenizer, ready.draft_state
        load_chat_template(folder, Tokenizer(folder))
        if not draft.ok:
            raise Refusal(draft.reason, draft.message)
    except Refusal as refusal:
        say(f"refused  {refusal}")
        return EXIT_CODES[refusal.reason]
    return 0
