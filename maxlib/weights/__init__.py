"""Reading and writing of Hugging Face models, in directories or on the hub, by a table that each model file declares.

How a tensor's name becomes a parameter: the family's `_table` in `maxlib/models/FAMILY.py` lists names and paths (with
`weights.names`), `mapping.py` expands it for the layers and experts of a model, `_loading.py` reads the arrays.
"""

from maxlib.weights import fields as fields
from maxlib.weights import files as files
from maxlib.weights import merging as merging
from maxlib.weights import names as names
from maxlib.weights._family import Family as Family
from maxlib.weights._family import families as families
from maxlib.weights._family import family_of as family_of
from maxlib.weights._family import from_pretrained as from_pretrained
from maxlib.weights._family import presets as presets
from maxlib.weights._family import push_to_hub as push_to_hub
from maxlib.weights._family import read_model as read_model
from maxlib.weights._family import save_pretrained as save_pretrained
from maxlib.weights._fields import Computed as Computed
from maxlib.weights._fields import Field as Field
from maxlib.weights._fields import Fields as Fields
from maxlib.weights._fields import Multimodal as Multimodal
from maxlib.weights._gguf import from_gguf as from_gguf
from maxlib.weights._gguf import save_gguf as save_gguf
from maxlib.weights._hf_config import REQUIRED as REQUIRED
from maxlib.weights._hf_config import HFConfig as HFConfig
from maxlib.weights._hf_config import read_config as read_config
from maxlib.weights._hub import download as download
from maxlib.weights._hub import model_directory as model_directory
from maxlib.weights._loading import load as load
from maxlib.weights._table import Absent as Absent
from maxlib.weights._table import Constant as Constant
from maxlib.weights._table import Convert as Convert
from maxlib.weights._table import Copy as Copy
from maxlib.weights._table import Entry as Entry
from maxlib.weights._table import Ignore as Ignore
from maxlib.weights._table import Renamed as Renamed
from maxlib.weights._table import Table as Table
from maxlib.weights._table import Weight as Weight
