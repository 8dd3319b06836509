"""State-space duality (Mamba-2): the public function, the sequential reference, and the chunked form."""

from maxlib.ops._ssd.api import explain_ssd as explain_ssd
from maxlib.ops._ssd.api import ssd as ssd
