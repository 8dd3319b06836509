"""Hugging Face directories to models and back, through a table that each model file declares."""

from maxlib.weights import names as names
from maxlib.weights.family import Family as Family
from maxlib.weights.family import families as families
from maxlib.weights.family import from_pretrained as from_pretrained
from maxlib.weights.family import presets as presets
from maxlib.weights.family import read_model as read_model
from maxlib.weights.family import save_pretrained as save_pretrained
from maxlib.weights.hf_config import HFConfig as HFConfig
from maxlib.weights.hf_config import read_config as read_config
from maxlib.weights.hf_config import rope_to_hf as rope_to_hf
from maxlib.weights.hf_config import written as written
from maxlib.weights.loading import load as load
from maxlib.weights.table import Absent as Absent
from maxlib.weights.table import Convert as Convert
from maxlib.weights.table import Copy as Copy
from maxlib.weights.table import Entry as Entry
from maxlib.weights.table import Ignore as Ignore
from maxlib.weights.table import Renamed as Renamed
from maxlib.weights.table import Table as Table
from maxlib.weights.table import Weight as Weight
