"""An engine that uses a server with OpenAI's HTTP API: sends token ids, receives token ids and log-probabilities."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import jax
from jaxtyping import Array, Key

from maxlib.inference._arguments import (
    Ids,
    Prompts,
    StopIds,
    check_limits,
    check_prompts,
    check_stop,
    integer,
    is_id,
    number,
)
from maxlib.inference._engine import Completion
from maxlib.inference._sampling import GREEDY, Keys, Sampler, check_sampler

_LARGEST = 1 << 28  # bytes of an answer
_READ, _QUOTED = 1 << 16, 300  # bytes of an answer that are read for an error, and characters that it shows
_IMPOSSIBLE = -9999.0  # what servers write for a probability of zero
_ROUNDING = 1e-5  # a rounded log-probability may exceed 0 by this


class ServerError(RuntimeError):
    """A server cannot be reached, rejects a request, or gives an answer that cannot be used.

    The message quotes the beginning of the answer, without the API key.
    """


class ServerEngine:
    """An engine that calls a server's `/v1/completions` (vLLM, or another server that returns token ids).

    Prompts are sent as ids, all at once, and the server batches them. Ids are read from `token_ids` (vLLM's
    `return_token_ids`) or from tokens written as `token_id:7`. A server that only returns text is an error, because
    encoding text again may change tokens. The server is called directly: redirects are an error, since the API key must
    not go elsewhere, and proxies of the environment are not used.

    Args:
        url: Address of the server, "http://host:8000".
        model: Name of the model there.
        save: Writes updated weights as a PEFT directory that the server can read, and returns its path, such as a
            function that calls `adapters.save`. `update` then loads it on the server, which needs
            `/v1/load_lora_adapter`. None for a server with fixed weights.
        logprobs_mode: Kind of log-probabilities that the server reports, in vLLM's terms: those of the model
            ("raw_logprobs") or those after temperature and filters ("processed_logprobs").
        connections: Maximum number of concurrent requests; on a GPU vLLM batches 256 to 1024 by default.
        timeout: Time limit of a request in seconds, from its connection to the end of the answer.
        api_key: API key of the server; None if it needs none.
        vocab: Number of ids in the vocabulary, so that ids outside it are errors, in prompts as in answers. None
            accepts all int32 from 0.
        seed: Seed of the random keys of calls without a key.

    Raises:
        ValueError: when an argument is out of range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        save: Callable[[Any], str | Path] | None = None,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
        connections: SupportsIndex = 256,
        timeout: float = 600.0,
        api_key: str | None = None,
        vocab: SupportsIndex | None = None,
        seed: int = 0,
    ):
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(f"logprobs_mode must be raw_logprobs or processed_logprobs, got {logprobs_mode!r}")
        if api_key is not None and not (
            api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
        ):
            raise ValueError(
                "api_key must be printable ASCII without spaces around it: read it from its file with .strip()"
            )
        self.url, self.model, self.base, self.save = url.rstrip("/"), model, model, save
        self._address = _parsed(self.url)
        self.logprobs_mode, self.api_key = logprobs_mode, api_key
        self.connections, self.timeout = integer("connections", connections), number("timeout", timeout)
        if not 0 < self.timeout <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout must be above 0 and at most {threading.TIMEOUT_MAX:g} seconds, got {timeout}")
        self.vocab = None if vocab is None else integer("vocab", vocab)
        self.updates, self.version, self._keys = 0, 0, Keys(seed)

    def update(self, weights: Any, version: int | None = None) -> None:
        """Writes weights with `save`, loads them as a new adapter, and unloads the previous one.

        Args:
            weights: What `save` takes.
            version: Their number in `Completion.versions`, by default one more than that of the last weights.

        Raises:
            ValueError: when there is no `save`.
            ServerError: when the server cannot be reached or does not load them.
        """
        if self.save is None:
            raise ValueError("update needs save=, a function that writes weights where the server reads them")
        old, self.updates = self.model, self.updates + 1
        name, path = f"{self.base}-{self.updates}", str(self.save(weights))
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        self.model, self.version = name, self.version + 1 if version is None else version
        if old != self.base:
            self._post("/v1/unload_lora_adapter", {"lora_name": old})

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: SupportsIndex | Ids,
        num_samples: SupportsIndex = 1,
        sampler: Sampler = GREEDY,
        stop_token_ids: StopIds = (),
        key: Key[Array, ""] | None = None,
    ) -> list[list[Completion]]:
        """Returns `num_samples` completions of each prompt.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: Maximum number of new tokens, for all prompts or for each.
            num_samples: Completions of each prompt.
            sampler: Draws tokens; the server must report log-probabilities at its temperature.
            stop_token_ids: Ids that end a completion and are its last token.
            key: Random key, from which each request gets a seed. Without it each call of this engine uses a new key, in
                the same order in every run.

        Raises:
            ValueError: when an argument is out of range, or the server reports log-probabilities of another
                temperature.
            ServerError: when the server cannot be reached, rejects a request, or returns anything but `num_samples`
                completions with the id and the log-probability of each token.
        """
        check_sampler(sampler)
        self._check(sampler)
        texts, stop = check_prompts(prompts, self.vocab), check_stop(stop_token_ids, self.vocab)
        limits, count = check_limits(max_new_tokens, len(texts)), integer("num_samples", num_samples)
        seeds = jax.random.randint(self._keys(key), (len(texts),), 0, 1 << 30).tolist()
        shared = self._options(sampler, count, stop)
        requests = [
            shared | {"prompt": text, "max_tokens": limit, "seed": seed}
            for text, limit, seed in zip(texts, limits, seeds, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor(self.connections) as pool:
            complete = functools.partial(self._complete, stop=stop, sampler=sampler, version=self.version)
            return list(pool.map(complete, requests))

    def _complete(
        self, request: dict[str, Any], stop: frozenset[int], sampler: Sampler, version: int
    ) -> list[Completion]:
        """Returns the completions of one prompt."""
        path = "/v1/completions"
        answer = self._post(path, request)
        try:
            completions = _completions(answer, request["n"], request["max_tokens"], stop, sampler, self.vocab)
            return [dataclasses.replace(each, versions=[version] * len(each.tokens)) for each in completions]
        except (ValueError, RecursionError) as error:
            raise self._error(path, f"gave an answer that cannot be used ({error})", answer) from None

    def _options(self, sampler: Sampler, num_samples: int, stop: Collection[int]) -> dict[str, Any]:
        """Returns the part of a request that is the same for all prompts."""
        # Send all settings, because servers take missing ones from the model's generation_config.json.
        draws = {"top_k": sampler.top_k or -1, "top_p": sampler.top_p or 1.0, "min_p": sampler.min_p or 0.0}
        draws |= {"temperature": sampler.temperature, "repetition_penalty": sampler.repetition_penalty}
        draws |= {"presence_penalty": sampler.presence_penalty, "frequency_penalty": sampler.frequency_penalty}
        # A request only ends at these ids; the model's own end-of-text id is ignored.
        ends = {"stop_token_ids": sorted(stop), "ignore_eos": True}
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
        return {"model": self.model, "n": num_samples, "logprobs": 1} | draws | ends | ids

    def _check(self, sampler: Sampler) -> None:
        """Raises ValueError if the reported log-probabilities are not those at the sampler's temperature."""
        raw = self.logprobs_mode == "raw_logprobs"
        if raw and sampler.temperature not in (0, 1):
            raise ValueError(
                f"raw_logprobs are at temperature 1, but the sampler has {sampler.temperature}: start the server with "
                "--logprobs-mode processed_logprobs and pass logprobs_mode=, or sample at 1"
            )
        filters = sampler.penalizes or {sampler.top_k, sampler.top_p, sampler.min_p} != {None}
        if not raw and (sampler.temperature == 0 or filters):
            raise ValueError(
                f"processed_logprobs are computed after filters, so there must be no filters; got {sampler}"
            )

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        """Posts JSON, and returns the answer; raises ServerError if there is none or its status is not of success."""
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        deadline = time.monotonic() + self.timeout
        secure = self._address.scheme == "https"
        connection = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(
            self._address.netloc, timeout=self.timeout
        )
        late = f"did not answer within {self.timeout:g} s"
        try:
            connection.connect()
            with _cut_at(deadline, connection.sock):
                connection.request("POST", self._address.path + path, json.dumps(body).encode(), headers)
                answer = connection.getresponse()
                text = answer.read(_LARGEST + 1)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            ended = isinstance(error, TimeoutError) or time.monotonic() >= deadline
            happened = "cannot be reached" if isinstance(error, OSError) else "did not answer by HTTP"
            raise self._error(path, late if ended else f"{happened}: {error!r}") from None
        finally:
            connection.close()
        if time.monotonic() >= deadline:  # a cut answer may look like a complete one
            raise self._error(path, f"{late} to the end, with status {answer.status}", text)
        if len(text) > _LARGEST:
            raise self._error(path, f"gave an answer of more than {_LARGEST} bytes", text)
        if answer.status in range(300, 400):
            location = answer.headers.get("Location", "")
            raise self._error(path, f"answered {answer.status}, a redirect, which is not followed", location.encode())
        if answer.status not in range(200, 300):
            raise self._error(path, f"answered {answer.status}", text)
        return text

    def _error(self, path: str, happened: str, answer: bytes | None = None) -> ServerError:
        """Returns an error that quotes the beginning of an answer, without the API key."""
        quotes = [happened] if answer is None else [happened, repr(answer[:_READ].decode(errors="replace"))]
        if self.api_key is not None:
            quotes = [quote.replace(self.api_key, "[api_key]") for quote in quotes]
        # Shorten after the key is out, so that no piece of it stays.
        quotes = [quote if len(quote) <= _QUOTED else f"{quote[:_QUOTED]}..." for quote in quotes]
        return ServerError(f"{self.url}{path} {': '.join(quotes)}")


class ReloadingServerEngine(ServerEngine):
    """A `ServerEngine` that replaces all weights of a vLLM server, not only an adapter.

    The server must run with `VLLM_SERVER_DEV_MODE=1`, on an address that nobody else reaches, as this mode also lets
    anyone call the server's own functions. An update waits until the running requests have ended, reloads the weights,
    empties the prefix cache, because it was computed with the former weights, and goes on.

    Args:
        url: Address of the server.
        model: Name of the model there.
        save: Writes updated weights as a directory of safetensors that the server can read, and returns its path, such
            as a function that calls `maxlib.save_pretrained(..., overwrite=True)`. Engines in several threads must not
            share a directory: one would replace what the server of another reads.
        options: Other arguments of `ServerEngine`.
    """

    def __init__(self, url: str, model: str, *, save: Callable[[Any], str | Path], **options: Any):
        super().__init__(url, model, save=save, **options)
        self._save = save

    def update(self, weights: Any, version: int | None = None) -> None:
        """Writes weights with `save`, and loads them on the server.

        Args:
            weights: What `save` takes.
            version: Their number in `Completion.versions`, by default one more than that of the last weights.

        Raises:
            ServerError: when the server cannot be reached, is in another mode, or does not load them.
        """
        path = str(Path(self._save(weights)).absolute())
        self._post("/pause?mode=wait", {})
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            answer = self._post("/reset_prefix_cache", {})
            if json.loads(answer).get("success") is not True:
                raise self._error("/reset_prefix_cache", "kept prefixes of the former weights", answer)
        finally:
            self._post("/resume", {})
        self.updates += 1
        self.version = self.version + 1 if version is None else version


@contextlib.contextmanager
def _cut_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """Ends a connection at a time of `time.monotonic`: a socket's own timeout is that of each read."""

    def cut() -> None:
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # also of TLS, whose own would first say goodbye

    timer = threading.Timer(deadline - time.monotonic(), cut)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _parsed(url: str) -> urllib.parse.SplitResult:
    """Returns the parts of a server's address; raises ValueError for anything else."""
    address = urllib.parse.urlsplit(url)
    _ = address.port  # raises ValueError if it is no number
    if address.username is not None or address.password is not None:
        raise ValueError("url must hold no user or password: pass a key as api_key=")
    if address.scheme not in ("http", "https") or not address.hostname or address.query or address.fragment:
        raise ValueError(f"url must be an address such as http://host:8000, got {url!r}")
    return address


def _completions(
    answer: bytes, count: int, limit: int, stop: frozenset[int], sampler: Sampler, vocab: int | None
) -> list[Completion]:
    """Reads the completions of one prompt; raises ValueError for an answer that is not as the API and the request say.

    Args:
        answer: JSON.
        count: Number of completions.
        limit: Maximum number of tokens.
        stop: Ids that end a completion.
        sampler: The sampler.
        vocab: Number of ids in the vocabulary.
    """
    fields = json.loads(answer)
    choices = fields.get("choices") if isinstance(fields, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("it must be a JSON object with a list of choices")
    numbered = {choice.get("index"): choice for choice in choices if type(choice.get("index")) is int}
    if len(choices) != count or numbered.keys() != set(range(count)):
        raise ValueError(
            f"the server must return {count} completions, with the indices from 0, got {len(choices)} with "
            f"{[choice.get('index') for choice in choices]}"
        )
    return [_completion(numbered[n], limit, stop, sampler, vocab) for n in range(count)]


def _completion(
    choice: dict[str, Any], limit: int, stop: frozenset[int], sampler: Sampler, vocab: int | None
) -> Completion:
    details = choice.get("logprobs")
    details = details if isinstance(details, dict) else {}
    tokens, log_probs = choice.get("token_ids") or _ids(details.get("tokens")), details.get("token_logprobs")
    tokens, log_probs = (x if isinstance(x, list) else [] for x in (tokens, log_probs))
    if not tokens or len(tokens) != len(log_probs):
        raise ValueError(
            "the server must return the id and the log-probability of each token, got "
            f"{len(tokens)} ids and {len(log_probs)} log-probabilities: text alone cannot be trained on. vLLM returns both"
        )
    for token, log_prob in zip(tokens, log_probs, strict=True):
        if not is_id(token, vocab):
            raise ValueError(f"ids must be integers of the vocabulary, [0, {vocab or 'int32'}), got {token!r}")
        if type(log_prob) not in (int, float) or not _IMPOSSIBLE < log_prob <= _ROUNDING:
            raise ValueError(
                f"log-probabilities of drawn tokens must be numbers above {_IMPOSSIBLE} and at most 0, got {log_prob!r}"
            )
    ended, reason = tokens[-1] in stop, choice.get("finish_reason")
    if reason not in ("stop", "length") or (reason == "stop" and not ended) or not stop.isdisjoint(tokens[:-1]):
        raise ValueError(
            "a completion must end with the first of stop_token_ids or by its length; got "
            f"{reason!r} after id {tokens[-1]}"
        )
    if len(tokens) > limit or (reason == "length" and len(tokens) < limit):
        raise ValueError(
            f"a completion must have max_new_tokens={limit} tokens unless a stop token ends it, got {len(tokens)} tokens "
            f"and {reason!r}: does the prompt fit the server's maximum length with them?"
        )
    log_probs = [min(float(log_prob), 0.0) for log_prob in log_probs]
    # Some servers say "length" of a stop token that is the last one allowed.
    return Completion(tokens, log_probs, "stop" if ended else "length", sampler)


def _ids(tokens: Any) -> list[int]:
    """Reads tokens written as `token_id:7`; returns none if there are others."""
    names = tokens if isinstance(tokens, list) else []
    numbers = [name.removeprefix("token_id:") if isinstance(name, str) else "" for name in names]
    written = all(
        name == f"token_id:{n}" and n.isascii() and n.isdecimal() for name, n in zip(names, numbers, strict=True)
    )
    return [int(n) for n in numbers] if written else []
