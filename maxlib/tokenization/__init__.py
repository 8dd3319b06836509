"""Training and saving of tokenizers in Hugging Face's format, and chat templates of models.

Every name is loaded on first use.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.tokenization._chat_template import ChatTemplate as ChatTemplate
    from maxlib.tokenization._special_tokens import special_tokens as special_tokens
    from maxlib.tokenization._tokenizer import byte_lengths as byte_lengths
    from maxlib.tokenization._tokenizer import load_tokenizer as load_tokenizer
    from maxlib.tokenization._tokenizer import save_tokenizer as save_tokenizer
    from maxlib.tokenization._tokenizer import train_bpe as train_bpe

__getattr__, __dir__ = lazy(__name__, __file__)
