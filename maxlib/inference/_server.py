"""An engine that uses a server with OpenAI's HTTP API: sends token ids, receives token ids and log-probabilities."""

import concurrent.futures
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jaxtyping import Array, Key

from maxlib.inference._engine import Completion, limits
from maxlib.inference._generate import Prompts, check_stop
from maxlib.inference._sampling import GREEDY, Keys, Sampler


class ServerEngine:
    """An engine that calls a server's `/v1/completions` (vLLM, or another server that returns token ids).

    Prompts are sent as ids, all at once, and the server batches them. Ids are read from `token_ids` (vLLM's
    `return_token_ids`) or from tokens written as `token_id:7`. A server that only returns text is an error, because
    encoding text again may change tokens.

    Args:
        url: Address of the server, "http://host:8000".
        model: Name of the model there.
        save: Writes updated weights as a PEFT directory that the server can read, and returns its path, such as a
            function that calls `adapters.save`. `update` then loads it on the server, which needs
            `/v1/load_lora_adapter`. None for a server with fixed weights.
        logprobs_mode: Kind of log-probabilities that the server reports, in vLLM's terms: those of the model
            ("raw_logprobs") or those after temperature and filters ("processed_logprobs").
        connections: Maximum number of concurrent requests.
        timeout: Time limit of a request in seconds.
        api_key: API key of the server; None if it needs none.
        seed: Seed of the random keys of calls without a key.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        save: Callable[[Any], str | Path] | None = None,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
        connections: int = 64,
        timeout: float = 600.0,
        api_key: str | None = None,
        seed: int = 0,
    ):
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(f"logprobs_mode must be raw_logprobs or processed_logprobs, got {logprobs_mode!r}")
        self.url, self.model, self.base, self.save = url.rstrip("/"), model, model, save
        self.logprobs_mode, self.connections, self.timeout, self.api_key = logprobs_mode, connections, timeout, api_key
        self.updates, self._keys = 0, Keys(seed)

    def update(self, weights: Any) -> None:
        """Writes weights with `save`, loads them as a new adapter, and unloads the previous one.

        Raises:
            ValueError: when there is no `save`.
        """
        if self.save is None:
            raise ValueError("update needs save=, a function that writes weights where the server reads them")
        old, self.updates = self.model, self.updates + 1
        name, path = f"{self.base}-{self.updates}", str(self.save(weights))
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        self.model = name
        if old != self.base:
            self._post("/v1/unload_lora_adapter", {"lora_name": old})

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int | Sequence[int],
        num_samples: int = 1,
        sampler: Sampler = GREEDY,
        stop_token_ids: Collection[int] = (),
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
            ValueError: when `stop_token_ids` are not ids, or the server returns no ids or log-probabilities, or those
                of another temperature.
            RuntimeError: when the server rejects a request or cannot be reached.
        """
        self._check(sampler)
        stop = check_stop(stop_token_ids)
        seeds = jax.random.randint(self._keys(key), (len(prompts),), 0, 1 << 30).tolist()
        shared = self._options(sampler, num_samples, stop)
        requests = [
            shared | {"prompt": [int(t) for t in prompt], "max_tokens": most, "seed": seed}
            for prompt, most, seed in zip(prompts, limits(max_new_tokens, prompts), seeds, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor(self.connections) as pool:
            answers = list(pool.map(lambda request: self._post("/v1/completions", request), requests))
        return [_completions(answer, num_samples, stop, sampler) for answer in answers]

    def _options(self, sampler: Sampler, num_samples: int, stop: Collection[int]) -> dict[str, Any]:
        """Returns the part of a request that is the same for all prompts."""
        # Send all settings, because servers take missing ones from the model's generation_config.json.
        draws = {"top_k": sampler.top_k or -1, "top_p": sampler.top_p or 1.0, "min_p": sampler.min_p or 0.0}
        draws |= {"temperature": sampler.temperature, "repetition_penalty": 1.0}
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
        if not raw and (sampler.temperature == 0 or {sampler.top_k, sampler.top_p, sampler.min_p} != {None}):
            raise ValueError(
                f"processed_logprobs are computed after filters, so there must be no filters; got {sampler}"
            )

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Posts JSON, and returns the answer, parsed if it is JSON."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"{self.url}{path} answered {error.code}: {said}") from error
        except OSError as error:  # refused, timed out
            raise RuntimeError(f"{self.url}{path} cannot be reached: {error}") from error
        return json.loads(text) if text[:1] in ("{", "[") else text


def _completions(answer: dict[str, Any], num_samples: int, stop: frozenset[int], sampler: Sampler) -> list[Completion]:
    """Reads the completions of one prompt; raises ValueError if ids or log-probabilities are missing."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != num_samples:
        raise ValueError(f"the server must return {num_samples} completions, got {len(choices)}")
    return [_completion(choice, stop, sampler) for choice in choices]


def _completion(choice: dict[str, Any], stop: frozenset[int], sampler: Sampler) -> Completion:
    found = choice.get("logprobs") or {}
    tokens, scores = choice.get("token_ids") or _ids(found.get("tokens") or ()), found.get("token_logprobs")
    if not tokens or scores is None or len(tokens) != len(scores) or None in scores:
        raise ValueError(
            "the server must return the id and the log-probability of each token, got "
            f"{len(tokens)} ids and {len(scores or ())} log-probabilities: text alone cannot be trained on. vLLM returns both"
        )
    ended, reason = tokens[-1] in stop, choice.get("finish_reason")
    if reason not in ("stop", "length") or (reason == "stop") != ended:
        raise ValueError(
            f"a completion must end with one of stop_token_ids or by its length; got {reason!r} after id {tokens[-1]}"
        )
    return Completion(list(tokens), [float(score) for score in scores], reason, sampler)


def _ids(tokens: Sequence[str]) -> list[int]:
    """Reads tokens written as `token_id:7`; returns none if there are others."""
    parts = [token.partition("token_id:") for token in tokens]
    return [int(number) for _, _, number in parts] if all(name for _, name, _ in parts) else []
