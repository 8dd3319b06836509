"""Hugging Face directories to models and back, through a table that each model file declares."""

from maxlib.weights import names as names
from maxlib.weights._family import Family as Family
from maxlib.weights._family import families as families
from maxlib.weights._family import from_pretrained as from_pretrained
from maxlib.weights._family import presets as presets
from maxlib.weights._family import read_model as read_model
from maxlib.weights._family import save_pretrained as save_pretrained
from maxlib.weights._hf_config import HFConfig as HFConfig
from maxlib.weights._hf_config import read_config as read_config
from maxlib.weights._hf_config import rope_to_hf as rope_to_hf
from maxlib.weights._hf_config import written as written
from maxlib.weights._loading import load as load
from maxlib.weights._table import Absent as Absent
from maxlib.weights._table import Convert as Convert
from maxlib.weights._table import Copy as Copy
from maxlib.weights._table import Entry as Entry
from maxlib.weights._table import Ignore as Ignore
from maxlib.weights._table import Renamed as Renamed
from maxlib.weights._table import Table as Table
from maxlib.weights._table import Weight as Weight
