"""Chat messages to a prompt by the model's own template, in a sandbox; clients' text never becomes control tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider_runtime.errors import BadRequest, Refusal
from outrider_runtime.server.tokenizer import Tokenizer, any_of

Message = Mapping[str, str]  # role, content, perhaps name


class _Generation(jinja2.ext.Extension):
    """Templates mark the assistant's part with {% generation %}, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, names: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`names` are the template's own words for tokens: bos_token, eos_token, … Raises Refusal(UnsupportedModel)."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise Refusal("UnsupportedModel", f"the chat template does not parse: {error}; correct it") from error
        self._names = dict(names)
        self._tokenizer = tokenizer
        # What the model wrote itself may hold tokens that are markup, not control (</think>): templates look for them.
        self._in_clients_text = any_of(tokenizer.control_tokens)
        self._in_assistants_text = any_of(tokenizer.special_tokens)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the conversation and the beginning of an answer. Raises BadRequest when the template does."""
        protected: dict[str, str] = {}
        nonce = secrets.token_hex(8)

        def protect(match: re.Match[str]) -> str:
            mark = f"\ue000{nonce}:{len(protected)}\ue001"
            protected[mark] = match[0]
            return mark

        shielded = [
            {
                name: (self._in_assistants_text if message["role"] == "assistant" else self._in_clients_text).sub(
                    protect, value
                )
                for name, value in message.items()
            }
            for message in messages
        ]
        try:
            text = self._template.render(
                messages=shielded, add_generation_prompt=True, tools=None, documents=None, **self._names
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        return self._tokenizer.encode_protected(text, protected)


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """From chat_template.jinja or tokenizer_config.json; None when the model has none. Raises Refusal."""
    config = _json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    try:
        source = file.read_text() if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if isinstance(source, list):  # several templates by name
        source = {template["name"]: template["template"] for template in source}.get("default")
    if not source:
        return None
    mapped = _json(folder / "special_tokens_map.json")  # where old tokenizers name them
    config |= {name: value for name, value in mapped.items() if not config.get(name)}
    names = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return ChatTemplate(source, names, tokenizer)


def _json(file: Path) -> dict[str, Any]:
    """Empty when there is no such file. Raises Refusal."""
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(found, dict):
        raise _unreadable(file, "not a JSON object")
    return found


def _unreadable(file: Path, why: object) -> Refusal:
    return Refusal("UnsupportedModel", f"{file} cannot be read ({why}); copy or download the model again")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: object, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own, escapes nothing for HTML: the model was trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
