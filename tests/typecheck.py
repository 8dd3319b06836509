"""The checker that looks at every annotation of maxlib while the tests run; `tests/conftest.py` installs it."""

import beartype

# An int is welcome where a float is annotated, as pyright has it.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
