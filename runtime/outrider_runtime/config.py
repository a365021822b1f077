"""What the runtime was started with: one frozen dataclass per concern."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider_runtime.speculation.policy import Policy

Method = Literal["ngram", "suffix", "draft-model", "eagle3", "eagle", "medusa"]
HEADS: tuple[Method, ...] = ("eagle3", "eagle", "medusa")  # whose draft goes on from the target's hidden states
WITH_WEIGHTS: tuple[Method, ...] = ("draft-model", *HEADS)
Device = Literal["cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """A model as the user names it: hf://ORG/NAME, pvc://CLAIM/PATH, or a local folder or GGUF file."""

    uri: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    method: Method = "ngram"
    draft: SourceConfig | None = None
    max_tokens: int = 4  # the most ever drafted per step: the capture tier
    ngram_min: int = 2  # shortest suffix matched
    ngram_max: int = 4  # longest suffix tried first
    suffix_cache_tokens: int = 262_144  # of finished outputs, of all requests; 0: drafts are of a request's own text
    suffix_min_probability: float = 0.2  # of a draft, estimated


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
