"""Plans for hardware that you do not have: does a training step fit, what does it move, how fast may it be.

python -m maxlib.plan llama3-70b --target v5p-128
"""

from maxlib.plan.api import estimated as estimated
from maxlib.plan.api import plan as plan
from maxlib.plan.api import plan_job as plan_job
from maxlib.plan.job import Job as Job
from maxlib.plan.report import Plan as Plan
from maxlib.plan.search import Search as Search
from maxlib.plan.search import search as search
from maxlib.plan.targets import Target as Target
from maxlib.plan.targets import parse_target as parse_target
