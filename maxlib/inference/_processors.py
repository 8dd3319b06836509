"""Processors of logits for `LocalEngine`."""

import json
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from maxlib.inference._arguments import check_stop, number
from maxlib.inference._requests import Request


class LogitBias:
    """Adds a number to the logits of some tokens.

        engine = inference.LocalEngine(model)
        engine.generate([[1, 2, 3]], processors=[inference.LogitBias({7: -100.0}, vocab=32)], max_new_tokens=2)

    Args:
        bias: The numbers by id.
        vocab: Number of ids in the vocabulary.

    Raises:
        ValueError: when an id is outside the vocabulary, or a bias is no finite number.
    """

    def __init__(self, bias: Mapping[int, float], vocab: int):
        check_stop(list(bias), vocab)
        self._bias = np.zeros(vocab, np.float32)
        for token, value in bias.items():
            self._bias[int(token)] = number(f"the bias of {token}", value)

    def __call__(self, request: Request) -> Float[np.ndarray, " V"]:
        """Returns what is added to the logits of the next token."""
        return self._bias


class Grammar:
    """Allows only tokens that continue a text of a grammar, with llguidance (`pip install "maxlib[grammar]"`).

    The end of the text needs `stop_token_ids`: end-of-text ids are allowed where the text may end.

    Its tokenizer comes from `Grammar.prepare`, once for all grammars. It keeps the state of each request that it
    steers.

    Args:
        grammar: A grammar of llguidance in Lark's syntax, or as `Grammar.json_schema` and `Grammar.regex` make it.
        tokenizer: What `Grammar.prepare` returns.

    Raises:
        ImportError: when llguidance is not installed.
        ValueError: when the grammar is wrong.
    """

    def __init__(self, grammar: str, tokenizer: Any):
        self._tokenizer, self._grammar, self._llguidance = tokenizer, grammar, _llguidance()
        self._matchers: weakref.WeakKeyDictionary[Request, Any] = weakref.WeakKeyDictionary()
        self._matcher()

    @staticmethod
    def prepare(tokenizer: Any, *, vocab: int, stop_token_ids: Collection[int]) -> Any:
        """Returns a tokenizer as llguidance reads it.

        Args:
            tokenizer: A `tokenizers.Tokenizer`.
            vocab: Number of ids of the model, at least those of the tokenizer.
            stop_token_ids: Ids that end a text, at least one; see `stop_tokens`.

        Raises:
            ValueError: when there are no `stop_token_ids`.
        """
        if not stop_token_ids:
            raise ValueError("a grammar needs stop_token_ids, the ids that end a text; see inference.stop_tokens")
        return _llguidance().LLTokenizer(tokenizer.to_str(), n_vocab=vocab, eos_token=list(stop_token_ids))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, tokenizer: Any) -> "Grammar":
        """Makes a grammar of the JSON texts of a schema.

        Args:
            schema: The JSON schema.
            tokenizer: What `Grammar.prepare` returns.
        """
        schema = schema if isinstance(schema, str) else json.dumps(schema)
        return cls(_llguidance().LLMatcher.grammar_from_json_schema(schema), tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> "Grammar":
        """Makes a grammar of the texts that match a regular expression (in Rust's syntax) as a whole.

        Args:
            pattern: The regular expression.
            tokenizer: What `Grammar.prepare` returns.
        """
        return cls(_llguidance().LLMatcher.grammar_from_regex(pattern), tokenizer)

    def __call__(self, request: Request) -> Float[np.ndarray, " V"]:
        """Returns 0 for tokens that may come next, and `-inf` for the others."""
        matcher, num_read = self._matchers.get(request) or (self._matcher(), 0)
        if not matcher.consume_tokens(request.tokens[num_read:]) or matcher.is_error():
            raise RuntimeError(f"the grammar cannot go on: {matcher.get_error()}")
        self._matchers[request] = (matcher, len(request.tokens))
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return np.where(allowed[: self._tokenizer.vocab_size], np.float32(0), np.float32(-np.inf))

    def _matcher(self) -> Any:
        matcher = self._llguidance.LLMatcher(self._tokenizer, self._grammar)
        if matcher.is_error():
            raise ValueError(f"the grammar must be one that llguidance accepts: {matcher.get_error()}")
        return matcher


def _llguidance() -> Any:
    """Returns the package; raises ImportError that names the extra."""
    try:
        import llguidance
    except ImportError:
        raise ImportError('a Grammar needs llguidance: pip install "maxlib[grammar]"') from None
    return llguidance
