"""Tokenizes chats, with targets on the turns to learn."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import grain
import numpy as np

from maxlib.data._audio import AudioProcessor, find_audio
from maxlib.data._images import ImageProcessor, expand, find_images
from maxlib.data._sources import Document, is_messages
from maxlib.data._tokenize import check_whole, with_tokens
from maxlib.tokenization._chat_template import ChatTemplate, Message, Span

Chooses = Callable[[int, Sequence[Message]], bool]


def tokenize_chats(
    documents: grain.MapDataset[Document],
    tokenizer: Any,
    template: ChatTemplate,
    *,
    learn: Literal["assistant", "last"] | Chooses = "assistant",
    images: ImageProcessor | None = None,
    audio: AudioProcessor | None = None,
) -> grain.MapDataset[Document]:
    """Adds `"tokens"` and `"targets"` to every document with `"messages"`; targets are -1 outside learned turns.

    A turn is the text that the template marks with `{% generation %}`. If it marks nothing, a turn is the text after
    its prompt, up to and including its end-of-turn token. The template writes all special tokens, and gets the
    `"tools"` and `"documents"` of a document.

    With `images`, a message's content may be a list of parts, `{"type": "text", "text": ...}` and `{"type": "image",
    "image": ...}`. Every document gets `"images"`, the `nn.vision.Patches` of all its images; the template's
    placeholder of an image is replaced by the ids of the image processor. `pack` puts them into rows. With `audio`,
    parts `{"type": "audio", "audio": ...}` become `"audio"`, the `nn.audio.Clips` of the document, in the same way.

    Args:
      documents: chats, such as those of `chats`.
      tokenizer: a `tokenizers.Tokenizer`, or a Hugging Face tokenizer that has one as its `backend_tokenizer`.
      template: the chat template.
      learn: the turns to learn: all of the assistant, the last of the assistant, or those for which `learn(i,
        messages)` is true.
      images: image processor, for models that read images.
      audio: audio processor, for models that hear.

    Raises:
      ValueError: when the tokenizer truncates or pads, or a record cannot be tokenized; the message names it.
    """
    check_whole(backend(tokenizer))
    if not callable(learn) and learn not in ("assistant", "last"):
        raise ValueError(f"learn must be 'assistant', 'last' or a function of (i, messages), got {learn!r}.")

    def tokenized(document: Document, _: int) -> Document:
        return with_tokens(document, with_targets(document, tokenizer, template, learn, images, audio))

    return map_named(documents, tokenized, "chat")


def map_named(
    documents: grain.MapDataset[Document], function: Callable[[Document, int], Any], name: str
) -> grain.MapDataset[Any]:
    """Applies `function` to each document and its index; errors name the record.

    Args:
      documents: the documents.
      function: called with a document and its index.
      name: name, in errors, of documents without a `"record"`.

    Raises:
      ValueError: when reading a document on which `function` fails.
    """
    return documents.map_with_index(partial(_named, function=function, name=name, count=len(documents)))


def _named(index: int, document: Document, *, function: Callable[[Document, int], Any], name: str, count: int) -> Any:
    try:
        return function(document, index)
    except Exception as error:  # jinja raises many kinds
        record = document.get("record", f"{name} {index % count}")
        raise ValueError(f"{record}: {type(error).__name__}: {error}") from error


def with_targets(
    document: Document,
    tokenizer: Any,
    template: ChatTemplate,
    learn: str | Chooses,
    images: ImageProcessor | None = None,
    audio: AudioProcessor | None = None,
) -> Document:
    """Returns tokens and targets of a document with `messages`, and its `images` and `audio` if they are processed."""
    tokenizer = backend(tokenizer)
    check_whole(tokenizer)  # a Hugging Face tokenizer keeps the settings of its last call
    if "messages" not in document:
        raise ValueError(f"a chat needs 'messages', got {sorted(document)}")
    messages = document["messages"]
    if not is_messages(messages):
        raise ValueError(f"'messages' must be a list of objects with a 'role', got {messages!r:.200}")
    chosen = _chosen(messages, learn)
    if not chosen:
        raise ValueError(f"no turn to learn (learn={learn!r}) among the roles {[m['role'] for m in messages]}")
    variables = {name: document[name] for name in ("tools", "documents") if name in document}
    text, spans = _rendered(template, messages, chosen, variables)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    tokens = np.array(encoded.ids, np.int32)
    targets = np.where(_learned(encoded.offsets, spans)[1:], tokens[1:], np.int32(-1))
    if not (targets >= 0).any():
        raise ValueError("the chosen turns have no tokens")
    row = _with_images(document, tokens, np.append(targets, np.int32(-1)), images)
    return row | _with_audio(document, row["tokens"], row["targets"], audio)


def backend(tokenizer: Any) -> Any:
    """Returns the `tokenizers.Tokenizer` of a Hugging Face tokenizer, or the argument if it already is one."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def _with_images(
    document: Document, tokens: np.ndarray, targets: np.ndarray, images: ImageProcessor | None
) -> Document:
    found = find_images(document)
    if images is None:
        if found:
            raise ValueError(f"the chat has {len(found)} images: pass images=data.ImageProcessor.from_directory(...)")
        return {"tokens": tokens, "targets": targets}
    cut = images.join([images(image) for image in found])
    placeholders = [images.placeholders(grid) for grid in cut.grids.tolist()]
    tokens, targets = expand(tokens, targets, images.image_token, placeholders)
    return {"tokens": tokens, "targets": targets, "images": cut}


def _with_audio(document: Document, tokens: np.ndarray, targets: np.ndarray, audio: AudioProcessor | None) -> Document:
    found = find_audio(document)
    if audio is None:
        if found:
            raise ValueError(f"the chat has {len(found)} clips: pass audio=data.AudioProcessor.from_directory(...)")
        return {}
    clips = audio.join([audio(sound) for sound in found])
    placeholders = [audio.placeholders(length) for length in clips.lengths.tolist()]
    tokens, targets = expand(tokens, targets, audio.audio_token, placeholders, "audio")
    return {"tokens": tokens, "targets": targets, "audio": clips}


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
    if len(spans) != len(turns):
        raise ValueError(f"the template marks {len(spans)} generations, the chat has {len(turns)} assistant turns")
    return text, [span for i, span in zip(turns, spans, strict=True) if i in chosen]


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
