"""What the runtime was started with: one frozen dataclass per concern."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider_runtime.speculation.policy import Policy

Method = Literal["ngram", "suffix", "draft-model", "eagle3", "eagle", "medusa"]
HEADS: tuple[Method, ...] = ("eagle3", "eagle", "medusa")  # whose draft goes on from the target's hidden states
WITH_WEIGHTS: tuple[Method, ...] = ("draft-model", *HEADS)
MOST_TREE_TOKENS = 63
Device = Literal["cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """A model as the user names it: hf://ORG/NAME, pvc://CLAIM/PATH, or a local folder or GGUF file."""

    uri: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Candidate trees in place of chains, for heads."""

    top_k: int  # candidates behind each token
    max_tokens: int  # drafts of a tree; its depth is the speculation's max_tokens


def tree_fault(top_k: int, depth: int, max_tokens: int) -> str | None:
    """Why a tree cannot grow, if it cannot; `max_tokens` is at fault. Its tokens take a bit each of 64, one of which is
    the text's own, and what the draft reads while the tree grows takes the places that its drafts will have."""
    reach = (depth - 1) * top_k
    if reach <= max_tokens <= MOST_TREE_TOKENS:
        return None
    return (
        f"a tree of {max_tokens} tokens; with {top_k} candidates behind each token and {depth} tokens behind each "
        f"other it takes from {reach}, which the draft reads meanwhile, to {MOST_TREE_TOKENS}"
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    method: Method = "ngram"
    draft: SourceConfig | None = None
    max_tokens: int = 4  # the most ever drafted per step, one behind the other: the capture tier
    tree: TreeConfig | None = None
    ngram_min: int = 2  # shortest suffix matched
    ngram_max: int = 4  # longest suffix tried first
    suffix_cache_tokens: int = 262_144  # of finished outputs, of all requests; 0: drafts are of a request's own text
    suffix_min_probability: float = 0.2  # of a draft, estimated

    @property
    def most_drafts(self) -> int:
        """Of a request, in one step."""
        return self.max_tokens if self.tree is None else self.tree.max_tokens


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16  # tokens per KV block
    num_blocks: int | None = None  # None: what memory_utilization leaves
    memory_utilization: float = 0.9  # share of the device's memory for weights, KV cache and workspace
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_concurrency: int = 256  # requests that run at once
    max_batched_tokens: int = 2048  # token budget of a step, prefill and decode together
    max_waiting: int | None = None  # None: 4 x max_concurrency

    @property
    def queue_limit(self) -> int:
        return 4 * self.max_concurrency if self.max_waiting is None else self.max_waiting


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: SourceConfig
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: Device = "cpu"
    dtype: DType = "auto"
    max_model_len: int | None = None  # None: the model's own
    tensor_parallel_size: int = 1
    download_dir: Path | None = None
    policy: Policy = field(default_factory=Policy)  # in force until an operator sets another


@dataclass(frozen=True, slots=True)
class ServerConfig:
    served_model_name: str
    host: str = "0.0.0.0"
    port: int = 8000
    admin_port: int = 8001
    api_key: str | None = None
    admin_token_file: Path | None = None  # read again on every PUT; None: PUT needs no token
    drain_timeout: float = 60.0  # seconds streams may run on after SIGTERM
    termination_log: Path = Path("/dev/termination-log")
