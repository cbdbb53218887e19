"""`python -m fxfuse`."""

import sys

from .cli import main

sys.exit(main())
