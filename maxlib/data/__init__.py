"""From text to batches: sources, tokenization, packing and an exactly resumable loader, composed of grain datasets.

Every name is loaded on first use, because importing grain takes seconds.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.data._audio import AudioProcessor as AudioProcessor
    from maxlib.data._audio import Qwen3OmniAudioProcessor as Qwen3OmniAudioProcessor
    from maxlib.data._audio import WaveformProcessor as WaveformProcessor
    from maxlib.data._audio import WhisperProcessor as WhisperProcessor
    from maxlib.data._bad_records import SkipBadRecords as SkipBadRecords
    from maxlib.data._documents import token_ids as token_ids
    from maxlib.data._fill_in_the_middle import fill_in_the_middle as fill_in_the_middle
    from maxlib.data._formats import HFStream as HFStream
    from maxlib.data._formats import files as files
    from maxlib.data._formats import parquet as parquet
    from maxlib.data._formats import records as records
    from maxlib.data._images import Gemma4ImageProcessor as Gemma4ImageProcessor
    from maxlib.data._images import GLM4VImageProcessor as GLM4VImageProcessor
    from maxlib.data._images import ImageProcessor as ImageProcessor
    from maxlib.data._images import PixtralImageProcessor as PixtralImageProcessor
    from maxlib.data._loader import Loader as Loader
    from maxlib.data._megatron import megatron_documents as megatron_documents
    from maxlib.data._megatron import megatron_samples as megatron_samples
    from maxlib.data._mixture import Mixture as Mixture
    from maxlib.data._packing import pack as pack
    from maxlib.data._padding import pad as pad
    from maxlib.data._padding import pad_document as pad_document
    from maxlib.data._pairs import kto_examples as kto_examples
    from maxlib.data._pairs import pairs as pairs
    from maxlib.data._pretokenize import read_manifest as read_manifest
    from maxlib.data._pretokenize import read_tokens as read_tokens
    from maxlib.data._pretokenize import write_tokens as write_tokens
    from maxlib.data._reader import in_workers as in_workers
    from maxlib.data._sources import array_record as array_record
    from maxlib.data._sources import chats as chats
    from maxlib.data._sources import in_memory as in_memory
    from maxlib.data._sources import jsonl as jsonl
    from maxlib.data._sources import python_docs as python_docs
    from maxlib.data._sources import split as split
    from maxlib.data._sources import text_files as text_files
    from maxlib.data._streams import WebDataset as WebDataset
    from maxlib.data._token_files import numpy_tokens as numpy_tokens
    from maxlib.data._tokenize import tokenize as tokenize
    from maxlib.data._tokenize import tokenize_chats as tokenize_chats
    from maxlib.data._videos import Gemma4VideoProcessor as Gemma4VideoProcessor
    from maxlib.data._videos import Qwen3VideoProcessor as Qwen3VideoProcessor
    from maxlib.data._videos import Video as Video
    from maxlib.data._videos import VideoProcessor as VideoProcessor

__getattr__, __dir__ = lazy(__name__, __file__)
