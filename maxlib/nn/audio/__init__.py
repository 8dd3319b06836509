"""Models that hear: the base class, and clips of sound as padded frames.

The encoder of a family is next to its model, in `maxlib/models/_gemma4_conformer.py`.
"""

from maxlib.nn.audio._clips import Clips as Clips
from maxlib.nn.audio._clips import check_clips as check_clips
from maxlib.nn.audio._clips import clips as clips
from maxlib.nn.audio._clips import padded_clips as padded_clips
from maxlib.nn.audio._clips import take_clips as take_clips
from maxlib.nn.decoder._audio_decoder import AudioDecoder as AudioDecoder
from maxlib.nn.decoder._audio_decoder import AudioModel as AudioModel
