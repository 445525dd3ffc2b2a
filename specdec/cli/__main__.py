"""`python -m specdec.cli` is the command `specdec`."""

import sys

from specdec.cli import main

sys.exit(main())
