"""Files of models in other formats: tensors, directories that appear as a whole, and what lies beside the weights."""

from maxlib.weights._buckets import local as local
from maxlib.weights._companions import GENERATION as GENERATION
from maxlib.weights._companions import add_end_of_turn as add_end_of_turn
from maxlib.weights._companions import first_ids as first_ids
from maxlib.weights._companions import write_companions as write_companions
from maxlib.weights._files import QUANTIZED as QUANTIZED
from maxlib.weights._files import Header as Header
from maxlib.weights._files import find_tensors as find_tensors
from maxlib.weights._files import read_header as read_header
from maxlib.weights._files import shard as shard
from maxlib.weights._files import write_file as write_file
from maxlib.weights._files import write_index as write_index
from maxlib.weights._resolve import Piece as Piece
from maxlib.weights._resolve import Tensor as Tensor
from maxlib.weights._resolve import resolve as resolve
from maxlib.weights._saving import MAX_SHARD_BYTES as MAX_SHARD_BYTES
from maxlib.weights._saving import whole_directory as whole_directory
from maxlib.weights._saving import write_json as write_json
