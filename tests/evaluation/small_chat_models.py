"""Folders with tiny random models and a tokenizer of single bytes, with chat templates of the kinds there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
BEGIN = "{% for message in messages %}<|user|>\n{{ message.content | trim }}</s>\n{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
EMPTY_THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATES = {
    "plain": None,
    # as Llama 3: begins with the token of beginnings
    "instruct": "{{ bos_token }}" + BEGIN + ANSWER,
    # as Qwen3: thinks unless told not to
    "hybrid": BEGIN + ANSWER + EMPTY_THOUGHT,
    # as QwQ and the distilled R1: every answer begins inside of a thought
    "thinking": BEGIN + ANSWER.replace("\n{% endif", "<think>\n{% endif"),
}


def byte_tokenizer(template: str = "plain") -> PreTrainedTokenizerFast:
    """A token for each byte, the special ones, and `<think>` and `</think>` as ordinary ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATES[template],
    )


def tiny_chat_model(model_type: str, tokenizer: Any, **options: Any) -> Any:
    """A random float32 model for `tokenizer`."""
    return tiny_model(
        model_type,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{"max_position_embeddings": 4096, "head_dim": 32, **options},
    )


def save_model(folder: Path, model_type: str, template: str, **options: Any) -> Path:
    """Writes a model and its tokenizer; the folder."""
    tokenizer = byte_tokenizer(template)
    tiny_chat_model(model_type, tokenizer, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
