"""Tokenizes text, and chats, with targets on the turns to learn."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import grain
import numpy as np

from maxlib.data._audio import AudioProcessor
from maxlib.data._documents import Document, is_messages, is_weight, map_named, text_of, token_ids
from maxlib.data._images import ImageProcessor, expand, find_parts
from maxlib.data._streams import Stream
from maxlib.data._videos import VideoProcessor
from maxlib.tokenization import ChatTemplate

if TYPE_CHECKING:
    from maxlib.nn.vision import Patches

Message = Mapping[str, Any]
Span = tuple[int, int]
Documents = TypeVar("Documents", grain.MapDataset, Stream)
Chooses = Callable[[int, Sequence[Message]], bool]
_ANSWER = "ANSWER"
_OF_LATER_STAGES = ("targets", "images", "audio", "source", "loss_weights")


@runtime_checkable
class Encodes(Protocol):
    """Protocol of tokenizers: `tokenizers.Tokenizer`, or any Hugging Face tokenizer."""

    def encode(self, text: Any, /, *, add_special_tokens: bool) -> Any: ...


def tokenize(
    documents: Documents, tokenizer: Encodes, *, bos_id: int | None = None, eos_id: int | None = None
) -> Documents:
    """Adds `"tokens"`, int32, to every document with `"text"`.

    The tokenizer's own template of special tokens is not applied; only the given ids are added. Fields of a record that
    have the names of what later stages add, `targets`, `images`, `audio`, `source` and `loss_weights`, are left out.

    Args:
        documents: Documents with `"text"`: a dataset, or a stream (`WebDataset`, `HFStream`).
        tokenizer: The tokenizer.
        bos_id: Token before each document, or None.
        eos_id: Token after each document, or None.

    Raises:
        ValueError: when the tokenizer truncates or pads, or `bos_id` or `eos_id` is no token id.
    """
    if isinstance(tokenizer, str):
        raise TypeError(
            f"tokenizer must be one, such as Tokenizer.from_file('tokenizer.json'), got the name {tokenizer!r}."
        )
    check_not_truncated(tokenizer)
    begin, end = end_ids(bos_id, eos_id)
    return documents.map(partial(_tokenized, tokenizer=tokenizer, begin=begin, end=end))


def check_not_truncated(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer that would truncate documents, or pad them with tokens that are learned as
    text.
    """
    for name in ("truncation", "padding"):
        if (setting := getattr(tokenizer, name, None)) is not None:
            raise ValueError(
                f"the tokenizer's {name} is on, {setting}: call tokenizer.no_{name}() first, or read it with "
                "tokenization.load_tokenizer"
            )


def end_ids(bos_id: int | None, eos_id: int | None) -> tuple[list[int], list[int]]:
    """Returns the ids before and after each document. Raises ValueError for one that is no token id."""
    for name, token in (("bos_id", bos_id), ("eos_id", eos_id)):
        token_ids([] if token is None else [token], name)
    return [] if bos_id is None else [bos_id], [] if eos_id is None else [eos_id]


def with_tokens(document: Document, made: Document) -> Document:
    """Returns a document with what was made of it by its tokenizer, without the fields that later stages add."""
    return {name: value for name, value in document.items() if name not in _OF_LATER_STAGES} | made


def _tokenized(document: Document, *, tokenizer: Encodes, begin: list[int], end: list[int]) -> Document:
    text = text_of(document)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = list(getattr(encoded, "ids", encoded))
    if not ids:
        raise ValueError(f"The tokenizer made no tokens from the document {text[:80]!r}: remove it.")
    return with_tokens(document, {"tokens": np.array([*begin, *ids, *end], np.int32)})


def tokenize_chats(
    documents: grain.MapDataset[Document],
    tokenizer: Any,
    template: ChatTemplate,
    *,
    learn: Literal["assistant", "last"] | Chooses = "assistant",
    turn_weights: bool = False,
    images: ImageProcessor | None = None,
    videos: VideoProcessor | None = None,
    audio: AudioProcessor | None = None,
) -> grain.MapDataset[Document]:
    """Adds `"tokens"` and `"targets"` to every document with `"messages"`; targets are -1 outside learned turns.

    A turn is the text that the template marks with `{% generation %}`. If it marks nothing, a turn is the text after
    its prompt, up to and including its end-of-turn token. The template writes all special tokens, and gets the
    `"tools"` (a list, or JSON of one) and `"documents"` of a document, and what its `"chat_template_kwargs"` name.

    With `images`, a message's content may be a list of parts, `{"type": "text", "text": ...}` and `{"type": "image",
    "image": ...}`. Every document gets `"images"`, the `nn.vision.Patches` of all its images; the template's
    placeholder of an image is replaced by the ids of the image processor. `pack` puts them into rows. With `videos`,
    parts `{"type": "video", "video": ...}` become images as well, one for each group of frames, in the order of the
    chat; times that a model reads are written into the text. With `audio`, parts `{"type": "audio", "audio": ...}`
    become `"audio"`, the `nn.audio.Clips` of the document, in the same way.

    Args:
        documents: Chats, such as those of `chats`.
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face tokenizer that has one as its `backend_tokenizer`.
        template: The chat template.
        learn: The turns to learn: all of the assistant, the last of the assistant, or those for which `learn(i,
            messages)` is true.
        turn_weights: True reads each message's `"weight"`, a number of at least 0, by default 1. Documents then have
            `"loss_weights"`, the weight of each target; a turn of weight 0 is not learned. Pack them with
            `loss_weights=True`.
        images: Image processor, for models that read images.
        videos: Video processor, for models that read videos.
        audio: Audio processor, for models that hear.

    Raises:
        ValueError: when the tokenizer truncates or pads, or a record cannot be tokenized; the message names it.
    """
    check_not_truncated(backend(tokenizer))
    warn_of_endless_turns(template)
    if not callable(learn) and learn not in ("assistant", "last"):
        raise ValueError(f"learn must be 'assistant', 'last' or a function of (i, messages), got {learn!r}.")

    def tokenized(document: Document, _: int) -> Document:
        chat = with_targets(document, tokenizer, template, learn, images, videos, audio, turn_weights=turn_weights)
        return with_tokens(document, chat)

    return map_named(documents, tokenized, "chat")


def with_targets(
    document: Document,
    tokenizer: Any,
    template: ChatTemplate,
    learn: str | Chooses,
    images: ImageProcessor | None = None,
    videos: VideoProcessor | None = None,
    audio: AudioProcessor | None = None,
    *,
    turn_weights: bool = False,
) -> Document:
    """Returns tokens and targets of a document with `messages`, and its `images` and `audio` if they are processed."""
    tokenizer = backend(tokenizer)
    check_not_truncated(tokenizer)  # a Hugging Face tokenizer keeps the settings of its last call
    if "messages" not in document:
        raise ValueError(f"a chat needs 'messages', got {sorted(document)}")
    messages = document["messages"]
    if not is_messages(messages):
        raise ValueError(f"'messages' must be a list of objects with a 'role', got {messages!r:.200}")
    weights = [_turn_weight(message) for message in messages]
    chosen = [i for i in _chosen(messages, learn) if weights[i]]
    if not chosen:
        raise ValueError(f"no turn to learn (learn={learn!r}) among the roles {[m['role'] for m in messages]}")
    if not turn_weights and any(weight != 1 for weight in weights):
        raise ValueError(f"messages have the weights {weights}: give turn_weights=True, or remove them")
    variables = {name: document[name] for name in ("tools", "documents") if name in document}
    if isinstance(variables.get("tools"), str):  # as TRL's data sets store objects of different fields
        variables["tools"] = json.loads(variables["tools"])
    variables |= document.get("chat_template_kwargs") or {}
    text, spans = _rendered(template, messages, chosen, variables)
    films, text, spans = _with_times(document, tokenizer, text, spans, videos)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    tokens = np.array(encoded.ids, np.int32)
    targets = np.where(_learned(encoded.offsets, spans)[1:], tokens[1:], np.int32(-1))
    if not (targets >= 0).any():
        raise ValueError("the chosen turns have no tokens")
    row = _with_images(document, tokens, np.append(targets, np.int32(-1)), images, videos, films)
    row |= _with_audio(document, row["tokens"], row["targets"], audio)
    if turn_weights:
        _check_marks(spans, chosen)
        row["loss_weights"] = np.zeros(len(row["tokens"]), np.float32)
        # [len(targets)] -> [len(row)]: images and clips add tokens, but the learned targets keep their order.
        placeholders = [part.image_token for part in (images, videos) if part is not None]  # which are no targets
        placeholders += [] if audio is None else [audio.audio_token]
        by_target = _weights_of(encoded.offsets, spans, [weights[i] for i in chosen])[1:]
        row["loss_weights"][row["targets"] >= 0] = by_target[(targets >= 0) & ~np.isin(targets, placeholders)]
    return row


def warn_of_endless_turns(template: ChatTemplate) -> None:
    """Warns if nothing that is learned follows an answer, so that a model would never learn to stop.

    Some templates write the end of a turn as the beginning of the next one (GLM), or after `{% endgeneration %}`.
    """
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text, spans = _rendered(template, messages, [1], {})
    except ValueError:  # a template for other chats, or one whose turns cannot be told
        return
    learned = "".join(text[begin:end] for begin, end in spans)
    if not learned.rpartition(_ANSWER)[2].strip():
        warnings.warn(
            "the chat template writes no end of a turn that is learned, so the model does not learn to stop: let it write "
            "a token, such as eos_token, after each answer, inside of {% generation %} if it marks answers",
            stacklevel=3,
        )


def backend(tokenizer: Any) -> Any:
    """Returns the `tokenizers.Tokenizer` of a Hugging Face tokenizer, or the argument if it already is one."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def _with_times(
    document: Document, tokenizer: Any, text: str, spans: list[Span], videos: VideoProcessor | None
) -> tuple[list["Patches"], str, list[Span]]:
    """Returns the frames of all videos, and the text with a placeholder, and perhaps the time, of each frame.

    Each video has one placeholder in `text`; `spans` of characters move with what is written in its place.
    """
    sources = find_parts(document, "video")
    if videos is None:
        if sources:
            raise ValueError(f"the chat has {len(sources)} videos: pass videos=data.VideoProcessor.from_directory(...)")
        return [], text, spans
    films = [videos.frames_of(source) for source in sources]
    name = tokenizer.id_to_token(videos.image_token)
    pieces = text.split(name)
    if len(pieces) - 1 != len(films):
        raise ValueError(f"the template wrote {len(pieces) - 1} video placeholders for {len(films)} videos")
    written, moves = pieces[0], []
    for (_, times), piece in zip(films, pieces[1:], strict=True):
        frames = videos.text(times, tokenizer.id_to_token)
        moves.append((len(written) - sum(by for _, by in moves), len(frames) - len(name)))
        written += frames + piece

    def moved(place: int) -> int:
        # What is written belongs to the span that its placeholder belongs to.
        return place + sum(by for start, by in moves if start < place)

    return [patches for patches, _ in films], written, [(moved(begin), moved(end)) for begin, end in spans]


def _with_images(
    document: Document,
    tokens: np.ndarray,
    targets: np.ndarray,
    images: ImageProcessor | None,
    videos: VideoProcessor | None,
    films: "Sequence[Patches]",
) -> Document:
    pictures = find_parts(document, "image")
    if images is None and pictures:
        raise ValueError(f"the chat has {len(pictures)} images: pass images=data.ImageProcessor.from_directory(...)")
    if images is None and videos is None:
        return {"tokens": tokens, "targets": targets}
    kinds: list[tuple[ImageProcessor, list["Patches"]]] = []
    if images is not None:
        kinds.append((images, [images(picture) for picture in pictures]))
    if videos is not None:
        kinds.append((videos, list(films)))
    # Images and frames, as iterators of patches with one grid each, in the order of their placeholders.
    waiting = {kind.image_token: (kind, _each(kind.join(patches))) for kind, patches in kinds}
    ordered, placeholders = [], []
    for token in tokens[np.isin(tokens, list(waiting))].tolist():
        kind, each = waiting[token]
        if (patches := next(each, None)) is not None:
            ordered.append(patches)
        placeholders.append([token] if patches is None else kind.placeholders(np.asarray(patches.grids[0])))
    if (left := sum(len(list(each)) for _, each in waiting.values())) or len(ordered) != len(placeholders):
        count = len(ordered) + left
        raise ValueError(f"the template wrote {len(placeholders)} image placeholders for {count} images")
    tokens, targets = expand(tokens, targets, list(waiting), placeholders)
    return {"tokens": tokens, "targets": targets, "images": kinds[0][0].join(ordered)}


def _each(patches: "Patches") -> "Iterator[Patches]":
    """Yields each image of `patches`."""
    ends = np.cumsum([0, *patches.grids.prod(axis=1)])
    for grid, start, end in zip(patches.grids, ends, ends[1:], strict=False):
        yield type(patches)(patches.pixels[start:end], grid[None])


def _with_audio(document: Document, tokens: np.ndarray, targets: np.ndarray, audio: AudioProcessor | None) -> Document:
    sounds = find_parts(document, "audio")
    if audio is None:
        if sounds:
            raise ValueError(f"the chat has {len(sounds)} clips: pass audio=data.AudioProcessor.from_directory(...)")
        return {}
    clips = audio.join([audio(sound) for sound in sounds])
    placeholders = [audio.placeholders(length) for length in clips.lengths.tolist()]
    tokens, targets = expand(tokens, targets, audio.audio_token, placeholders, "audio")
    return {"tokens": tokens, "targets": targets, "audio": clips}


def _turn_weight(message: Message) -> float:
    weight = message.get("weight")
    if weight is None:  # or of a table in which other messages have weights
        return 1.0
    if not is_weight(weight):
        raise ValueError(f"a message's 'weight' must be a finite number of at least 0, got {weight!r}")
    return float(weight)


def _chosen(messages: Sequence[Message], learn: str | Chooses) -> list[int]:
    if callable(learn):
        return [i for i in range(len(messages)) if learn(i, messages)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return turns[-1:] if learn == "last" else turns


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], chosen: list[int], variables: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """Returns the text, and the character spans of the chosen turns."""
    if not template.marks_generation or any(messages[i]["role"] != "assistant" for i in chosen):
        text = template(messages, add_generation_prompt=False, **variables)
        return text, [_span(template, messages, i, text, variables) for i in chosen]
    text, spans = template.generated(messages, **variables)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) > len(turns) and chosen == turns:
        return text, spans  # several pieces of a turn, all of which are learned
    _check_marks(spans, turns)
    return text, [span for i, span in zip(turns, spans, strict=True) if i in chosen]


def _check_marks(spans: Sequence[Span], turns: Sequence[int]) -> None:
    if len(spans) != len(turns):
        raise ValueError(f"the template marks {len(spans)} generations, the chat has {len(turns)} assistant turns")


def _span(template: ChatTemplate, messages: Sequence[Message], i: int, text: str, variables: Mapping[str, Any]) -> Span:
    """Returns the character span that message `i` adds to the chat so far."""
    prompt = messages[i]["role"] == "assistant"
    before = template(messages[:i], add_generation_prompt=prompt, **variables) if i else ""
    after = template(messages[: i + 1], add_generation_prompt=False, **variables)
    if not (after.startswith(before) and text.startswith(after)):
        raise ValueError(
            f"the template renders the messages up to {i} differently when more follow, so the position of the turn is "
            "unknown: "
            "mark it in the template with {% generation %}, or use learn='last'"
        )
    return len(before), len(after)


def _weights_of(offsets: Sequence[Span], spans: Sequence[Span], weights: Sequence[float]) -> np.ndarray:
    """Returns the weight of the turn of each token, the largest if it is in several, and 0 outside."""
    turns = [np.where(_learned(offsets, [span]), weight, 0) for span, weight in zip(spans, weights, strict=True)]
    return np.max(turns, axis=0).astype(np.float32)


def _learned(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Returns, for each token, whether any of its characters is in one of the spans.

    So a token that a tokenizer merges across the border of a turn is learned, as in transformers.
    """
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    # A token begins where the one before it ends: some tokenizers trim spaces from the offsets.
    begins = np.minimum(begins, np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]))
    ends = np.maximum(ends, begins + 1)  # a token without text is where it stands
    learned = np.zeros(len(begins), bool)
    for begin, end in spans:
        learned |= (begins < end) & (ends > begin)
    return learned
