"""Low-precision matmuls with qwix, applied to a model from outside: for training, and of weights after training."""

from maxlib.quantization._apply import for_inference as for_inference
from maxlib.quantization._apply import for_training as for_training
from maxlib.quantization._apply import full_precision as full_precision
from maxlib.quantization._files import load as load
from maxlib.quantization._files import save as save
from maxlib.quantization._formats import INFERENCE as INFERENCE
from maxlib.quantization._formats import TRAINING as TRAINING
from maxlib.quantization._formats import Format as Format
from maxlib.quantization._formats import Rule as Rule
from maxlib.quantization._formats import Rules as Rules
from maxlib.quantization._gptq import gptq as gptq
from maxlib.quantization._report import Comparison as Comparison
from maxlib.quantization._report import Errors as Errors
from maxlib.quantization._report import Report as Report
from maxlib.quantization._report import compare as compare
from maxlib.quantization._report import compare_methods as compare_methods
from maxlib.quantization._report import report as report
from maxlib.quantization._rotate import rotate as rotate
from maxlib.quantization._scales import awq as awq
from maxlib.quantization._scales import smoothquant as smoothquant
