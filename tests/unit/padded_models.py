"""Model directories whose vocabulary is larger than their tokenizer's (not a test file)."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PIECES = ["<pad>", "<eos>", "<unk>", "▁", *"0123456789+=\n"]
VOCABULARY = 64


def metaspace():
    """As of SentencePiece models converted."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(PIECES)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_padded(directory, **config):
    """A random Llama of three small layers, and a Metaspace tokenizer of 17 pieces."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 288,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        LlamaForCausalLM(LlamaConfig(**settings | config)).float().save_pretrained(directory)
    metaspace().save_pretrained(directory)
    return directory
