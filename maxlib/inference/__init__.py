"""Generation: prefill and decode over any model."""

from maxlib.chat import ChatTemplate as ChatTemplate
from maxlib.inference.generate import Generator as Generator
from maxlib.inference.generate import generate as generate
from maxlib.inference.sampling import GREEDY as GREEDY
from maxlib.inference.sampling import Sampler as Sampler
from maxlib.inference.speculate import Speculated as Speculated
from maxlib.inference.speculate import speculate as speculate
from maxlib.inference.text import encode as encode
from maxlib.inference.text import stream_text as stream_text
