"""Batches for post-training: pairs and labelled answers are the names of `data`, rollouts those of `inference`."""

from maxlib.data import kto_examples as kto_examples
from maxlib.data import pad as pad
from maxlib.data import pairs as pairs
from maxlib.inference._rollouts import completion_batch as completion_batch
