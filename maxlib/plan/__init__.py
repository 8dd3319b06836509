"""Plans training steps for hardware that you do not have: memory, communication, and a bound on the speed.

maxlib plan llama3-70b --target v5p-128
"""

from maxlib.plan._api import estimated as estimated
from maxlib.plan._api import plan as plan
from maxlib.plan._goodput import Cluster as Cluster
from maxlib.plan._goodput import Goodput as Goodput
from maxlib.plan._goodput import Tier as Tier
from maxlib.plan._goodput import simulate_goodput as simulate_goodput
from maxlib.plan._job import Job as Job
from maxlib.plan._report import Plan as Plan
from maxlib.plan._search import Search as Search
from maxlib.plan._search import search as search
from maxlib.plan._targets import Target as Target
from maxlib.plan._targets import parse_target as parse_target
