"""The operator's whole run: settings from flags and environment, logging, signals, and an exit code that says how it
ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from outrider_operator import logs, program
from outrider_operator.errors import OutriderError
from outrider_operator.settings import Settings

GARBAGE = 10_000  # new objects after which cycles are looked for


def run(arguments: Sequence[str]) -> int:
    """0 after SIGTERM or SIGINT, 1 when it could not go on (Kubernetes starts it anew), 2 for wrong settings."""
    try:
        settings = CliApp.run(Settings, cli_args=list(arguments))
    except (ValidationError, SettingsError) as error:
        sys.stderr.write(f"outrider-operator: {error}\n")
        return 2
    logs.set_up(settings.log_format, settings.log_level)
    # a thousand objects at a time make next to no cycles: looking for them as often as by default, and through
    # all modules, takes a tenth of the CPU
    gc.freeze()
    gc.set_threshold(GARBAGE)
    try:
        asyncio.run(_run(settings))
    except OutriderError as error:
        logging.getLogger(__name__).error("giving up: %s", error)
        return 1
    return 0


async def _run(settings: Settings) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    listen()
    await program.run(settings, stop, watching=listen)  # kopf takes the signals for itself when it starts
