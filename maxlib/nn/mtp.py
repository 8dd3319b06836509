"""Multi-token prediction (DeepSeek V3, arXiv:2412.19437): modules that predict further ahead than the next token."""

from maxlib.nn.decoder._mtp import MTP as MTP
from maxlib.nn.decoder._mtp import Drafter as Drafter
from maxlib.nn.decoder._mtp import MTPOutput as MTPOutput
from maxlib.nn.decoder._mtp import SupportsDrafting as SupportsDrafting
from maxlib.nn.decoder._mtp import draft as draft
from maxlib.nn.decoder._mtp import predict_ahead as predict_ahead
from maxlib.nn.decoder._mtp import shift_left as shift_left
from maxlib.nn.decoder._mtp_decoder import MTPDecoder as MTPDecoder
