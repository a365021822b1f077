"""Whole model folders made on the spot: tiny random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.runtime.tiny import reference_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ("the outrider rode ahead of the column to look at the road", "two good fords and a broken bridge")
OTHER_TEXT = ("speculation pays when drafts are accepted", "quick brown foxes jump over lazy dogs")


@cache
def tokenizer(text: tuple[str, ...] = TEXT) -> PreTrainedTokenizerFast:
    """All 256 bytes, a few merges learnt from `text`, and two special tokens: ids 0 and 1."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS, chat_template=CHAT_TEMPLATE
    )


def make_model(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    text: tuple[str, ...] = TEXT,
    seed: int = 0,
    shard_size: str = "1GB",
    **changes,
) -> Path:
    """A folder as save_pretrained writes it. `text` makes the tokenizer, `changes` go to the config."""
    words = tokenizer(text)
    shape = {"vocab_size": len(words), "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    model = reference_model(architecture, seed, **{**shape, **changes})
    model.save_pretrained(folder, max_shard_size=shard_size)
    words.save_pretrained(folder)
    return folder
