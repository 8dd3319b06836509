"""Models that see: images as inputs of a decoder, as rows of patches, and blocks of image encoders.

The encoder of a family is next to its model, in `maxlib/models/_gemma3_vision.py` and so on.
"""

from maxlib.nn.decoder._context import bidirectional_blocks as bidirectional_blocks
from maxlib.nn.vision._encoder import EncoderBlock as EncoderBlock
from maxlib.nn.vision._encoder import check_sizes as check_sizes
from maxlib.nn.vision._encoder import exact_gelu as exact_gelu
from maxlib.nn.vision._encoder import in_patches as in_patches
from maxlib.nn.vision._encoder import patch_embedding as patch_embedding
from maxlib.nn.vision._inputs import ImageInput as ImageInput
from maxlib.nn.vision._inputs import PatchInput as PatchInput
from maxlib.nn.vision._inputs import mrope_positions as mrope_positions
from maxlib.nn.vision._patches import Patches as Patches
from maxlib.nn.vision._patches import PatchPositions as PatchPositions
from maxlib.nn.vision._patches import pad_patches as pad_patches
from maxlib.nn.vision._patches import pad_patches_by_position as pad_patches_by_position
from maxlib.nn.vision._patches import patch_positions as patch_positions
from maxlib.nn.vision._patches import patchify as patchify
