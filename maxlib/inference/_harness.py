"""Evaluation with EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness)."""

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key
from rich.progress import track

from maxlib._utils.text import check_texts
from maxlib.inference._chat import read_model, stop_tokens
from maxlib.inference._continuous import LocalEngine
from maxlib.inference._generate import Generator
from maxlib.inference._requests import Request
from maxlib.inference._sampling import GREEDY, Sampler
from maxlib.inference._scoring import Score, evaluation_callback, score, score_documents
from maxlib.tokenization import ChatTemplate, load_tokenizer, special_tokens
from maxlib.weights import model_directory

logger = logging.getLogger(__name__)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def _base_class() -> Any:
    """Returns lm-eval's base class, or `object` if lm-eval is not installed, so that `Harness` can still be
    imported.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError:
        return object
    return TemplateLM


_TemplateLM: Any = _base_class()


class Harness(_TemplateLM):
    """A model for lm-eval: `lm_eval.simple_evaluate(Harness(...), tasks=[...])`, or `evaluate` for plain numbers.

    It tokenizes, truncates and scores like lm-eval's backend `hf`. To run on several devices, call it inside
    `sharding.use(layout)`.

    Args:
        model: Any model of the contract (`nn.Model`).
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face one.
        eos: Id that ends a text; by default the tokenizer's `eos_token_id`.
        bos: Id before a text without context; by default the tokenizer's `bos_token_id`, or else `eos`.
        stop_token_ids: Ids that end an answer; by default `eos`.
        template: Chat template for `apply_chat_template=True`.
        batch_size: Number of rows computed at once.
        max_length: Maximum number of tokens that the model reads; by default its own maximum, or 2048.
        max_new_tokens: Maximum number of tokens in an answer if the task does not set it.
        dtype: Dtype of the computation.
        key: Random key for tasks that sample; by default that of seed 0.

    Raises:
        ImportError: when lm-eval is not installed.
        ValueError: when there is no `eos`, or a size is not positive.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        eos: int | None = None,
        bos: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        template: ChatTemplate | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        max_new_tokens: int = 256,
        dtype: Any = jnp.bfloat16,
        key: Key[Array, ""] | None = None,
    ):
        if _TemplateLM is object:
            raise ImportError('Harness needs lm-eval: pip install "maxlib[eval]"')
        super().__init__()
        eos = getattr(tokenizer, "eos_token_id", None) if eos is None else eos
        if eos is None:
            raise ValueError(f"eos must be the id that ends a text: {type(tokenizer).__name__} does not name one")
        bos = getattr(tokenizer, "bos_token_id", None) if bos is None else bos
        self.generator, self.tokenizer, self.template = Generator(model, dtype=dtype), tokenizer, template
        self._eos, self._bos, self._key = eos, eos if bos is None else bos, key
        self._stop_token_ids = [eos] if stop_token_ids is None else list(stop_token_ids)
        self._batch, self.max_gen_toks = batch_size, max_new_tokens
        self.max_length = max_length or getattr(model, "max_length", None) or 2048
        if min(batch_size, self.max_length, max_new_tokens) < 1:
            sizes = f"{batch_size}, {max_length} and {max_new_tokens}"
            raise ValueError(f"batch_size, max_length and max_new_tokens must be positive, got {sizes}")

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> "Harness":
        """Loads a model with its tokenizer, its chat template, and the ids that begin and end texts.

        Args:
            name: A Hugging Face directory, or a name on the hub.
            options: Arguments of the class.
        """
        directory = model_directory(name)
        with contextlib.suppress(FileNotFoundError):
            options = {"template": ChatTemplate.from_directory(directory)} | options
        tokenizer, stops = load_tokenizer(directory), stop_tokens(directory)
        tokens = {name: tokenizer.token_to_id(text) for name, text in special_tokens(directory).items() if text}
        eos = tokens.get("eos_token")
        options = {
            "eos": next(iter(stops), None) if eos is None else eos,
            "bos": tokens.get("bos_token"),
            "stop_token_ids": stops or None,
            **options,
        }
        return cls(read_model(directory), tokenizer, **options)

    def evaluate(self, tasks: Sequence[Any], **options: Any) -> dict[str, float]:
        """Runs tasks, and returns numbers by name: `task/metric`, with `/filter` if the task has filters.

        Args:
            tasks: Names of lm-eval's tasks, paths of YAML files, or tasks.
            options: Arguments of `lm_eval.simple_evaluate`, such as `limit`, `num_fewshot` and `task_manager`.
        """
        import lm_eval

        check_texts("tasks", tasks)
        evaluated = lm_eval.simple_evaluate(self, tasks=list(tasks), **options)
        assert evaluated is not None  # there are results in the process of rank 0, and this is it
        return {
            "/".join([task, *(part for part in name.split(",") if part != "none")]): float(value)
            for task, values in evaluated["results"].items()
            for name, value in values.items()
            if isinstance(value, int | float) and "," in name
        }

    def callback(self, tasks: Sequence[Any], **options: Any) -> Callable[[Any], None]:
        """Returns a callback for `Trainer(callbacks=[(1000, harness.callback(tasks))])`.

        It uses the newest weights, and writes the numbers of `evaluate` as `eval/task/metric`. The harness must have
        been made from the trained model.

        Args:
            tasks: As for `evaluate`.
            options: Arguments of `evaluate`.
        """
        return evaluation_callback(self, lambda harness: harness.evaluate(tasks, **options))

    def update(self, weights: Any) -> None:
        """Replaces weights as `Generator.update` does; compiled programs stay in use."""
        self.generator.update(weights)

    @property
    def eot_token_id(self) -> int:
        """Returns the id that ends a text."""
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """Returns the id before a text without context."""
        return self._bos

    @property
    def tokenizer_name(self) -> str:
        """Returns a name for lm-eval's caches."""
        return str(getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the ids of a text; one that begins with the text of `prefix_token_id` gets no special tokens."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._decode([self._bos], special=True))
        encoded = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return list(getattr(encoded, "ids", encoded))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a chat as the prompt of its next answer, or of the rest of its last one.

        Templates that refuse a system message get the chat without it.
        """
        if self.template is None:
            raise ValueError(
                "this Harness has no chat template: give it one, template=ChatTemplate.from_directory(...)"
            )
        render = functools.partial(
            self.template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return render(chat_history)
        except ValueError:
            without_system = [message for message in chat_history if message["role"] != "system"]
            if len(without_system) == len(chat_history):
                raise
            logger.warning("the chat template refuses these messages: rendering them without the system message")
            return render(without_system)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the template, by which lm-eval distinguishes its caches."""
        return self.template.source if chat_template and self.template is not None else None

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Sums the log-probabilities of all tokens of each text, window by window."""
        documents = [self.tok_encode(*request.args) for request in requests]
        sizes = {"batch_size": self._batch, "max_length": self.max_length}
        totals = score_documents(self.generator, documents, prefix=self._bos, **sizes)
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continues each prompt up to the task's `until`, or the end of the text."""
        # A special token may be one of `until`; answers have none.
        with_special = types.SimpleNamespace(decode=functools.partial(self._decode, special=True))
        engine = LocalEngine(
            self.generator.model, slots=self._batch, tokenizer=with_special, dtype=self.generator.dtype
        )
        submitted = [self._submit(engine, n, *request.args) for n, request in enumerate(requests)]
        texts = []
        progress = track(submitted, "generate_until", disable=disable_tqdm)
        for request, (running, until) in zip(requests, progress, strict=True):
            tokens = [token for token in running.result().tokens if token not in self._stop_token_ids]
            texts.append(_before(self._decode(tokens), until))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _submit(self, engine: LocalEngine, n: int, prompt: str, options: dict[str, Any]) -> tuple[Request, list[str]]:
        """Starts the answer to a prompt, and returns it with the texts that end it."""
        until, most, sampler = _options(options, self.max_gen_toks)
        if not 0 < most < self.max_length:
            raise ValueError(
                f"the task asks for {most} new tokens; there must be 1 to {self.max_length - 1} (max_length - 1)"
            )
        until = [text for text in [*until, self._decode([self._eos], special=True)] if text]
        request = engine.submit(
            self.tok_encode(prompt)[-(self.max_length - most) :],
            max_new_tokens=most,
            sampler=sampler,
            stop_token_ids=self._stop_token_ids,
            stop=until,
            key=jax.random.fold_in(jax.random.key(0) if self._key is None else self._key, n),
        )
        return request, until

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> list[Score]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        scored = score(self.generator, pairs, batch_size=self._batch, max_length=self.max_length)
        scored = track(scored, "loglikelihood", total=len(pairs), disable=disable_tqdm)
        scores = [pair_score for _, pair_score in sorted(scored)]
        for request, value in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], value)
        return scores

    def _decode(self, ids: list[int], *, special: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=not special)


def _options(options: dict[str, Any], most: int) -> tuple[list[str], int, Sampler]:
    """Returns `until`, the maximum number of new tokens and the sampler of a task's `generation_kwargs`.

    Raises:
        ValueError: when one of them is not supported.
    """
    options = dict(options)
    until = options.pop("until", None) or []
    lengths = [
        options.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    ]
    most = int(next((length for length in lengths if length is not None), most))
    draws = options.pop("do_sample", float(options.get("temperature", 0.0)) > 0)
    filters = {name: options.pop(name) for name in _SAMPLING if name in options}
    if options or (draws and not filters.get("temperature")):
        raise ValueError(
            f"generation_kwargs may hold until, max_gen_toks, do_sample and {', '.join(_SAMPLING)}, with a temperature above 0 "
            f"to sample; got {options or {'do_sample': draws}}"
        )
    return [until] if isinstance(until, str) else list(until), most, Sampler(**filters) if draws else GREEDY


def _before(text: str, until: Sequence[str]) -> str:
    """Cuts a text at each of `until` in order, as lm-eval does: of overlapping texts the first one counts."""
    for end in until:
        text = text.split(end)[0]
    return text
