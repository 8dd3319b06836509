"""Low-rank adapters, added to a model from outside: training, merging, and reading and writing PEFT directories."""

from maxlib.adapters._apply import LoRA as LoRA
from maxlib.adapters._apply import Rule as Rule
from maxlib.adapters._apply import Rules as Rules
from maxlib.adapters._apply import add as add
from maxlib.adapters._apply import as_rules as as_rules
from maxlib.adapters._apply import base_model as base_model
from maxlib.adapters._apply import freeze as freeze
from maxlib.adapters._apply import merge as merge
from maxlib.adapters._apply import trainable as trainable
from maxlib.adapters._peft_config import lora_dropout as lora_dropout
from maxlib.adapters._peft_load import load as load
from maxlib.adapters._peft_save import save as save
from maxlib.adapters._report import Report as Report
from maxlib.adapters._report import report as report
