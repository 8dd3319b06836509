"""Models that see: base classes, blocks of image encoders, images as rows of patches, and their places among tokens.

The encoder of a family is next to its model, in `maxlib/models/_gemma3_vision.py` and so on.
"""

from maxlib.nn.decoder._context import bidirectional_blocks as bidirectional_blocks
from maxlib.nn.decoder._model import VisionModel as VisionModel
from maxlib.nn.decoder._native_vision import NativeVisionDecoder as NativeVisionDecoder
from maxlib.nn.decoder._vision_decoder import VisionDecoder as VisionDecoder
from maxlib.nn.vision._encoder import EncoderBlock as EncoderBlock
from maxlib.nn.vision._encoder import check_placeholders as check_placeholders
from maxlib.nn.vision._encoder import check_sizes as check_sizes
from maxlib.nn.vision._encoder import exact_gelu as exact_gelu
from maxlib.nn.vision._encoder import in_patches as in_patches
from maxlib.nn.vision._encoder import patch_embedding as patch_embedding
from maxlib.nn.vision._encoder import place_features as place_features
from maxlib.nn.vision._patches import Patches as Patches
from maxlib.nn.vision._patches import PatchPositions as PatchPositions
from maxlib.nn.vision._patches import check_patches as check_patches
from maxlib.nn.vision._patches import cut as cut
from maxlib.nn.vision._patches import mrope_positions as mrope_positions
from maxlib.nn.vision._patches import patch_positions as patch_positions
from maxlib.nn.vision._patches import patches as patches
from maxlib.nn.vision._patches import patches_by_position as patches_by_position
from maxlib.nn.vision._patches import take_features as take_features
