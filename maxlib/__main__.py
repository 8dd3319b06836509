"""`python -m maxlib` is the command `maxlib`."""

import sys

from maxlib._command import main

if __name__ == "__main__":
    sys.exit(main())
