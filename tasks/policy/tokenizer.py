"""The tiny policy's tokenizer: one token per character, and one token per fixed phrase.

It is a real `tokenizers` file, so transformers and vLLM load it like any other. Every printable
ASCII character and the newline have a token, so any English prompt can be encoded. Other characters
become `<unk>`. There is no chat template: the policy continues plain text."""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def character_tokenizer(phrases: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and one for each of `phrases`."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in dict.fromkeys(phrases)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
