"""The classes behind the presets, for other mesh axes and options: `FSDP | strategies.RingAttention("my_axis")`."""

from maxlib.sharding._parallelism import DataParallel as DataParallel
from maxlib.sharding._parallelism import ExpertParallel as ExpertParallel
from maxlib.sharding._parallelism import FullyShard as FullyShard
from maxlib.sharding._parallelism import Offload as Offload
from maxlib.sharding._parallelism import SequenceParallel as SequenceParallel
from maxlib.sharding._parallelism import ShardOptimizer as ShardOptimizer
from maxlib.sharding._parallelism import TensorParallel as TensorParallel
from maxlib.sharding._pipeline import Pipeline as Pipeline
from maxlib.sharding._sequence import AllGatherAttention as AllGatherAttention
from maxlib.sharding._sequence import ContextParallel as ContextParallel
from maxlib.sharding._sequence import RingAttention as RingAttention
from maxlib.sharding._sequence import SplitSequence as SplitSequence
from maxlib.sharding._sequence import UlyssesAttention as UlyssesAttention
from maxlib.sharding._strategy import ExpertLayer as ExpertLayer
from maxlib.sharding._strategy import Rules as Rules
from maxlib.sharding._strategy import ShardedWeight as ShardedWeight
from maxlib.sharding._strategy import StepFacts as StepFacts
from maxlib.sharding._strategy import Strategy as Strategy
from maxlib.sharding._strategy import Traffic as Traffic
from maxlib.sharding._strategy import join as join
from maxlib.sharding._strategy import parts_of as parts_of
