"""Mixes several sources into one stream of documents with given weights."""

import math
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import grain

from maxlib._utils.arguments import check_choice
from maxlib.data._documents import Document, is_weight
from maxlib.data._reader import CountingIterator, FromIterators, check_same, in_order

Weights = Mapping[str, float]


@runtime_checkable
class Sliceable(Protocol):
    """A source that a loader's shards can slice: a `grain.MapDataset`, a stream, or another mixture."""

    def __getitem__(self, part: slice, /) -> Any: ...


class Mixture:
    """Mixture of the documents of several sources with given weights.

        mixture = Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}, seed=0)
        Loader(lambda part: pack(mixture[part], length=512), batch_size=8)

    The next document always comes from the source that is furthest behind its share. Shares are therefore exact to
    within one document at every moment, in each of the loader's shards. Each document has its source's name under
    `"source"`.

    A run may be resumed with other sources and other weights. A source that stays continues where it was, in the order
    that it had; a new one begins at its start, and one that returns continues where it was when it left. The shares
    hold from then on.

    Args:
        sources: Documents by name.
        weights: Relative shares by name; default: by size. For a curriculum, a function from the step to shares, which
            may be zero. A shard computes the step from the tokens it has returned, so with packing that reads ahead
            (`first_fit`: `bins` rows) the shares change that much earlier than training.
        by: Unit of the shares, "tokens" or "documents".
        epochs: Number of times that a source is read, one number or by name; None (the default) repeats forever, unless
            the source itself ends. The share of an exhausted source goes to the others; the mixture ends with the last
            one.
        seed: Shuffles each source differently in every epoch, by its name. None reads sources in order, and warns about
            those that repeat in the same order.
        tokens_per_step: Tokens of one step over all shards, for a curriculum.

    Raises:
        ValueError: when a source is empty, or names or weights do not agree.
    """

    def __init__(
        self,
        sources: Mapping[str, Sliceable],
        weights: Weights | Callable[[int], Weights] | None = None,
        *,
        by: Literal["tokens", "documents"] = "tokens",
        epochs: int | Mapping[str, int | None] | None = None,
        seed: int | None = None,
        tokens_per_step: int | None = None,
    ):
        if not sources:
            raise ValueError("A mixture needs at least one source, got none.")
        for name, source in sources.items():
            if isinstance(source, grain.MapDataset) and len(source) == 0:
                raise ValueError(f"The source {name!r} of the mixture is empty: leave it out, or check its paths.")
        check_choice("by", by, ("tokens", "documents"))
        if callable(weights) and not (tokens_per_step and tokens_per_step > 0):
            raise ValueError(
                "Weights that depend on the step need tokens_per_step=, batch_size * length, to count steps by."
            )
        self.names, self.seed, self._by, self._tokens_per_step = tuple(sources), seed, by, tokens_per_step
        weights = _sizes(sources) if weights is None else weights
        self._weights = weights if callable(weights) else _constant(_checked(weights, self.names, positive=True))
        epochs = epochs if isinstance(epochs, Mapping) else dict.fromkeys(sources, epochs)
        _check_names("epochs", epochs, self.names)
        self._sources = {
            name: _epochs(name, source, epochs.get(name), None if seed is None else _seed_of(name, seed))
            for name, source in sources.items()
        }
        same = [name for name, source in sources.items() if _repeats_in_order(source, epochs.get(name), seed)]
        if same:
            warnings.warn(
                f"the sources {', '.join(same)} are read in the same order in every epoch: give seed=, shuffle them, or say "
                "epochs=1",
                stacklevel=2,
            )

    def __getitem__(self, part: slice) -> grain.IterDataset[Document]:
        """Reads the documents of one of the loader's shards."""
        return FromIterators(partial(_MixedIterator, self, part), self.names)

    def __repr__(self) -> str:
        return f"Mixture of {', '.join(self.names)}"

    def open(self, part: slice) -> list[grain.DatasetIterator]:
        """Opens an iterator over this part of every source."""
        return [iter(in_order(source[part])) for source in self._sources.values()]

    def weights_at(self, tokens: int) -> tuple[float, ...]:
        """Returns the weights after all shards have returned `tokens` tokens."""
        step = tokens // self._tokens_per_step if self._tokens_per_step else 0
        return tuple(_checked(self._weights(step), self.names, positive=False, at=f" at step {step}").values())

    def size(self, document: Document) -> int:
        """Returns the size of a document in the unit of the shares."""
        return len(document["tokens"]) if self._by == "tokens" else 1


class _MixedIterator(CountingIterator):
    """Iterator that adds each source's share to its credit for every document, subtracts the document's size from its
    own source, and reads the source with the most credit next.
    """

    def __init__(self, mixture: Mixture, part: slice):
        readers = mixture.open(part)
        super().__init__(readers)
        self._mixture, self._readers, self._shards = mixture, readers, part.step or 1
        self._credit, self._ended, self._tokens = [0.0] * len(readers), [False] * len(readers), 0
        self._beginnings = [reader.get_state() for reader in readers]
        self._absent: dict[str, Any] = {}  # positions of sources that the mixture had before a resume

    def __next__(self) -> Document:
        while not all(self._ended):
            shares = self._shares()
            i = max((i for i, share in enumerate(shares) if share), key=lambda i: (self._credit[i], shares[i]))
            name = self._mixture.names[i]
            document = self._read(i, name)
            if document is not None:
                self._account(i, name, document, shares)
                return {**document, "source": name}
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {
            "names": list(self._mixture.names),
            "seed": self._mixture.seed,
            "readers": [reader.get_state() for reader in self._readers],
            "credit": list(self._credit),
            "ended": list(self._ended),
            "tokens": self._tokens,
            "counts": [[name, count] for name, count in self.counts.items()],
            "absent": dict(self._absent),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        names, seed = self._mixture.names, self._mixture.seed
        check_same(state.get("seed", seed), seed, "sources shuffled with the seed")
        credit = dict(zip(state["names"], state["credit"], strict=True))
        positions = state["absent"] | dict(
            zip(state["names"], zip(state["readers"], state["ended"], strict=True), strict=True)
        )
        self._absent = {name: list(positions[name]) for name in positions if name not in names}
        for i, name in enumerate(names):
            position, self._ended[i] = positions.get(name, (self._beginnings[i], False))
            self._readers[i].set_state(position)
            self._credit[i] = credit.get(name, 0.0)
        self._tokens = state["tokens"]
        self.counts.clear()
        self.counts.update(dict(state["counts"]))
        if set(names) != set(state["names"]):
            self._balance(state["names"])

    def _balance(self, before: list[str]) -> None:
        """Spreads what sources that have left were behind, so that the credits add up to zero again."""
        names = self._mixture.names
        new = [name for name in names if name not in before]
        left = [name for name in before if name not in names]
        warnings.warn(
            f"the data state is of a mixture of {before}: {new} are new, and {left} are no longer read", stacklevel=2
        )
        rest = sum(self._credit)
        self._credit = [c - share * rest for c, share in zip(self._credit, self._shares(), strict=True)]

    def _shares(self) -> list[float]:
        """Computes each source's share of the next document; zero for an exhausted source."""
        weights = self._mixture.weights_at(self._tokens * self._shards)
        left = [0.0 if ended else weight for weight, ended in zip(weights, self._ended, strict=True)]
        if not sum(left):
            waiting = [name for name, ended in zip(self._mixture.names, self._ended, strict=True) if not ended]
            raise ValueError(
                f"All sources with a weight are exhausted after {self._tokens} tokens of this shard, while {waiting} "
                "have weight 0: give the others more epochs, or give these a weight."
            )
        return [weight / sum(left) for weight in left]

    def _read(self, i: int, name: str) -> Document | None:
        try:
            return next(self._readers[i])
        except StopIteration:
            self._ended[i] = True
            return None
        except Exception as error:
            error.add_note(f"While reading the source {name!r} of the mixture.")
            raise

    def _account(self, i: int, name: str, document: Document, shares: list[float]) -> None:
        if "tokens" not in document:
            raise ValueError(f"The source {name!r} has documents without 'tokens', {sorted(document)}: use tokenize().")
        size = self._mixture.size(document)
        for j, share in enumerate(shares):
            self._credit[j] += share * size
        self._credit[i] -= size
        self._tokens += len(document["tokens"])
        self.counts[f"tokens/{name}"] += len(document["tokens"])
        self.counts[f"documents/{name}"] += 1


def _seed_of(name: str, seed: int) -> int:
    """Returns a source's seed, which other sources do not change."""
    return (seed + zlib.crc32(name.encode())) % (1 << 32)


def _epochs(name: str, source: Sliceable, epochs: int | None, seed: int | None) -> Sliceable:
    """Repeats the source for its number of epochs, reshuffled each time."""
    if not isinstance(source, grain.MapDataset):
        if epochs is not None:
            raise ValueError(
                f"The source {name!r} is a {type(source).__name__}, which sets its own epochs: omit it from epochs."
            )
        return source
    if len(source) == sys.maxsize:
        if epochs is not None or seed is not None:
            raise ValueError(
                f"The source {name!r} already repeats: pass it without .repeat() to set epochs= and seed=."
            )
        return source
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs} for the source {name!r}.")
    return (source if seed is None else source.shuffle(seed=seed)).repeat(epochs)


def _repeats_in_order(source: Sliceable, epochs: int | None, seed: int | None) -> bool:
    """Returns True for a finite source that is read more than once without shuffling."""
    finite = isinstance(source, grain.MapDataset) and len(source) < sys.maxsize
    return finite and seed is None and epochs != 1 and not _is_shuffled(source)


def _is_shuffled(source: Any) -> bool:
    return "Shuffle" in type(source).__name__ or any(map(_is_shuffled, source.parents))


def _length(source: Sliceable) -> int:
    return len(source) if isinstance(source, grain.MapDataset) else 0


def _sizes(sources: Mapping[str, Sliceable]) -> Weights:
    sizes = {name: _length(source) for name, source in sources.items()}
    unknown = [name for name, size in sizes.items() if size in (0, sys.maxsize)]
    if unknown:
        raise ValueError(f"The sizes of {unknown} are not known: name weights=.")
    return sizes


def _constant(weights: Weights) -> Callable[[int], Weights]:
    return lambda step: weights


def _checked(weights: Weights, names: tuple[str, ...], *, positive: bool, at: str = "") -> Weights:
    """Returns the weights in the order of the sources."""
    _check_names(f"weights{at}", weights, names)
    missing = [name for name in names if name not in weights]
    bad = [name for name, weight in weights.items() if not is_weight(weight) or (positive and weight == 0)]
    if missing or bad or not 0 < sum(weights.values()) < math.inf:
        raise ValueError(
            f"weights{at} must name a {'positive' if positive else 'non-negative'} number for every source of {names}, "
            f"not all zero, got {dict(weights)}."
        )
    return {name: float(weights[name]) for name in names}


def _check_names(what: str, values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"{what} names {unknown}, which are not among the sources {list(names)}.")
