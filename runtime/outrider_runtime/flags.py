"""From the command line and the environment to configuration.

A bad value is a Refusal(InvalidArgument) that names flag, value and fix. Imports nothing heavy: the engine's process
starts loading while the rest of this one is still being imported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from outrider_runtime.config import (
    HEADS,
    MOST_TREE_TOKENS,
    WITH_WEIGHTS,
    CacheConfig,
    EngineConfig,
    Method,
    SchedulerConfig,
    ServerConfig,
    SourceConfig,
    SpeculationConfig,
    TreeConfig,
    tree_fault,
)
from outrider_runtime.deprecated import modernize
from outrider_runtime.errors import Refusal
from outrider_runtime.speculation.policy import MAX_SPECULATIVE_TOKENS, Policy, PolicyError, parse_policy


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise Refusal("InvalidArgument", f"{text}; see `{self.prog} --help`")


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be {wanted}; got {text!r}")
        return value

    return parse


def _number(low: float, high: float, wanted: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {wanted}; got {text!r}")
        return value

    return parse


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        type=_text,
        metavar="URI",
        help="hf://ORG/NAME, pvc://CLAIM/PATH, a folder or a GGUF file",
    )
    add("--revision", type=_text, metavar="R", help="branch, tag or commit of an hf:// model")
    add(
        "--speculative-method",
        choices=["draft-model", "ngram", "suffix", *HEADS],
        help="default: draft-model with --draft-model, else ngram",
    )
    add("--draft-model", type=_text, metavar="URI", help="the draft, named like --model")
    add("--draft-revision", type=_text, metavar="R", help="branch, tag or commit of an hf:// draft")
    add(
        "--max-speculative-tokens",
        type=_integer(1, MAX_SPECULATIVE_TOKENS),
        default=4,
        metavar="TIER",
        help="the most ever drafted per step (4)",
    )
    add("--tree-top-k", type=_integer(1, 16), metavar="K", help="draft trees: candidates behind each token (chains)")
    add("--tree-max-tokens", type=_integer(1, MOST_TREE_TOKENS), metavar="N", help="tokens of a tree")
    add("--ngram-min", type=_integer(1, 64), default=2, metavar="N", help="shortest suffix matched (2)")
    add("--ngram-max", type=_integer(1, 64), default=4, metavar="N", help="longest suffix tried first (4)")
    add(
        "--suffix-cache-tokens",
        type=_integer(0),
        default=262_144,
        metavar="N",
        help="of finished outputs, which all requests draft from; 0: each from its own text only (262144)",
    )
    add(
        "--suffix-min-probability",
        type=_number(0.0, 1.0, "a probability from 0.0 to 1.0"),
        default=0.2,
        metavar="P",
        help="of a draft, estimated, for it to be made (0.2)",
    )
    add("--device", choices=["cuda", "cpu"], default="cpu")
    add("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    add("--max-model-len", type=_integer(2), metavar="N", help="prompt and answer together (the model's own)")
    add("--max-concurrency", type=_integer(1, 65536), default=256, metavar="N", help="requests that run at once (256)")
    add(
        "--max-batched-tokens",
        type=_integer(1),
        metavar="N",
        help="token budget of a step (2048, on a CPU 256; at least --max-concurrency)",
    )
    add(
        "--gpu-memory-utilization",
        type=_number(0.01, 1.0, "a share from 0.01 to 1.0"),
        default=0.9,
        metavar="SHARE",
        help="of the device's memory (0.90)",
    )
    add("--kv-blocks", type=_integer(1), metavar="N", help="KV blocks (what the memory leaves)")
    add("--block-size", type=_integer(1, 1024), default=16, metavar="N", help="tokens per KV block (16)")
    add("--no-prefix-caching", action="store_true")
    add("--tensor-parallel-size", type=_integer(1), default=1, metavar="N")
    add("--download-dir", type=Path, metavar="PATH", help="where downloads go")


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--served-model-name", type=_text, metavar="NAME", help="the name clients ask for (from --model)")
    add("--host", default="0.0.0.0", metavar="ADDRESS")
    add("--port", type=_integer(1, 65535), default=8000)
    add("--admin-port", type=_integer(1, 65535), default=8001, help="health, metrics and /v1/speculation")
    add("--admin-token-file", type=Path, metavar="PATH", help="PUT /v1/speculation needs its content as bearer token")
    add("--api-key", type=_text, help="or environment OUTRIDER_API_KEY")
    add("--api-key-file", type=Path, metavar="PATH")
    add(
        "--drain-timeout",
        type=_number(0, 86400, "seconds from 0 to 86400"),
        default=60.0,
        metavar="SECONDS",
        help="how long streams may run on after SIGTERM (60)",
    )
    add(
        "--termination-log",
        type=Path,
        default=Path("/dev/termination-log"),
        metavar="PATH",
        help="where a refusal is written, if it exists",
    )


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="outrider", description="Speculative LLM inference.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the OpenAI API", allow_abbrev=False)
    _add_engine_flags(serve)
    _add_server_flags(serve)
    check = commands.add_parser(
        "check", help="say whether target and draft fit together and on the device", allow_abbrev=False
    )
    _add_engine_flags(check)
    return top


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed flags, and a warning for each flag that has a newer name. Raises Refusal(InvalidArgument)."""
    modern, warnings = modernize(argv)
    return parser().parse_args(modern), warnings


def engine_config(flags: argparse.Namespace, environment: Mapping[str, str]) -> EngineConfig:
    """Raises Refusal(InvalidArgument or UnsupportedParallelism)."""
    if flags.tensor_parallel_size > 1:
        raise Refusal(
            "UnsupportedParallelism", f"--tensor-parallel-size {flags.tensor_parallel_size}; only 1 is supported"
        )
    return EngineConfig(
        model=SourceConfig(flags.model, flags.revision),
        speculation=_speculation(flags),
        cache=CacheConfig(
            block_size=flags.block_size,
            num_blocks=flags.kv_blocks,
            memory_utilization=flags.gpu_memory_utilization,
            prefix_caching=not flags.no_prefix_caching,
        ),
        scheduler=_scheduler(flags),
        device=flags.device,
        dtype=flags.dtype,
        max_model_len=flags.max_model_len,
        tensor_parallel_size=flags.tensor_parallel_size,
        download_dir=flags.download_dir,
        policy=_policy(environment.get("OUTRIDER_POLICY", ""), flags.max_speculative_tokens),
    )


def _scheduler(flags: argparse.Namespace) -> SchedulerConfig:
    concurrency, tokens = flags.max_concurrency, flags.max_batched_tokens
    if tokens is None:
        # A step reads so much of a prompt; on a CPU more would hold the decodes beside it up for seconds.
        tokens = max(concurrency, 256 if flags.device == "cpu" else 2048)
    if tokens < concurrency:
        raise Refusal(
            "InvalidArgument",
            f"--max-batched-tokens {tokens} is below --max-concurrency {concurrency}, one token for each running "
            f"request; raise it to {concurrency} or lower --max-concurrency",
        )
    return SchedulerConfig(max_concurrency=concurrency, max_batched_tokens=tokens)


def _speculation(flags: argparse.Namespace) -> SpeculationConfig:
    method: Method = flags.speculative_method or ("draft-model" if flags.draft_model else "ngram")
    if method in WITH_WEIGHTS and not flags.draft_model:
        raise Refusal("InvalidArgument", f"--speculative-method {method} needs --draft-model URI")
    if method not in WITH_WEIGHTS and flags.draft_model:
        raise Refusal(
            "InvalidArgument",
            f"--speculative-method {method} takes no draft, but --draft-model {flags.draft_model} is given; drop one",
        )
    if flags.draft_revision and not flags.draft_model:
        raise Refusal("InvalidArgument", f"--draft-revision {flags.draft_revision} needs --draft-model URI")
    if flags.ngram_min > flags.ngram_max:
        raise Refusal("InvalidArgument", f"--ngram-min {flags.ngram_min} is above --ngram-max {flags.ngram_max}")
    return SpeculationConfig(
        method=method,
        tree=_tree(flags, method),
        draft=SourceConfig(flags.draft_model, flags.draft_revision) if flags.draft_model else None,
        max_tokens=flags.max_speculative_tokens,
        ngram_min=flags.ngram_min,
        ngram_max=flags.ngram_max,
        suffix_cache_tokens=flags.suffix_cache_tokens,
        suffix_min_probability=flags.suffix_min_probability,
    )


def _tree(flags: argparse.Namespace, method: Method) -> TreeConfig | None:
    top_k, max_tokens = flags.tree_top_k, flags.tree_max_tokens
    if top_k is None and max_tokens is None:
        return None
    if top_k is None or max_tokens is None:
        raise Refusal("InvalidArgument", "--tree-top-k and --tree-max-tokens are given together or not at all")
    if method not in HEADS:
        raise Refusal("InvalidArgument", f"--tree-top-k: --speculative-method {method} drafts chains; drop it")
    if fault := tree_fault(top_k, flags.max_speculative_tokens, max_tokens):
        raise Refusal("InvalidArgument", f"--tree-max-tokens {max_tokens} makes {fault}")
    return TreeConfig(top_k, max_tokens)


def _policy(text: str, max_tokens: int) -> Policy:
    if not text.strip():
        return Policy(num_speculative_tokens=max_tokens)
    try:
        return parse_policy(json.loads(text))
    except (PolicyError, json.JSONDecodeError) as error:
        raise Refusal("InvalidArgument", f"environment OUTRIDER_POLICY: {error}") from error


def server_config(flags: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """Raises Refusal(InvalidArgument)."""
    if flags.port == flags.admin_port:
        raise Refusal("InvalidArgument", f"--port and --admin-port are both {flags.port}; give them different ports")
    return ServerConfig(
        served_model_name=flags.served_model_name or _name_of(flags.model),
        host=flags.host,
        port=flags.port,
        admin_port=flags.admin_port,
        api_key=_api_key(flags, environment),
        admin_token_file=flags.admin_token_file,
        drain_timeout=flags.drain_timeout,
        termination_log=flags.termination_log,
    )


def _name_of(uri: str) -> str:
    scheme, separator, rest = uri.rstrip("/").partition("://")
    return rest if separator and scheme == "hf" else uri.rstrip("/").rpartition("/")[2]


def _api_key(flags: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    if flags.api_key and flags.api_key_file:
        raise Refusal("InvalidArgument", "--api-key and --api-key-file are both given; drop one")
    if flags.api_key_file:
        return read_secret("--api-key-file", flags.api_key_file)
    return flags.api_key or environment.get("OUTRIDER_API_KEY") or None


def read_secret(flag: str, path: Path) -> str:
    """The file's text without surrounding blanks. Raises Refusal(InvalidArgument) when there is none."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            "InvalidArgument", f"{flag} {path} cannot be read ({error}); give a readable text file"
        ) from error
    if not text:
        raise Refusal("InvalidArgument", f"{flag} {path} is empty; put the secret in it")
    return text
