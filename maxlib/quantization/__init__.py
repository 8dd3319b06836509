"""Matmuls in fewer bits, by qwix, applied to a model from outside: in training, and in its weights after training."""

from maxlib.quantization.apply import for_inference as for_inference
from maxlib.quantization.apply import for_training as for_training
from maxlib.quantization.apply import full_precision as full_precision
from maxlib.quantization.files import load as load
from maxlib.quantization.files import save as save
from maxlib.quantization.formats import INFERENCE as INFERENCE
from maxlib.quantization.formats import TRAINING as TRAINING
from maxlib.quantization.formats import Format as Format
from maxlib.quantization.report import Errors as Errors
from maxlib.quantization.report import Report as Report
from maxlib.quantization.report import compare as compare
from maxlib.quantization.report import matmuls as matmuls
from maxlib.quantization.report import report as report
from maxlib.quantization.rules import Rule as Rule
from maxlib.quantization.rules import Rules as Rules
from maxlib.quantization.rules import high as high
