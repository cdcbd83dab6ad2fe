"""Entry point of python -m fastgrad."""

import sys

from fastgrad.tools.cli import main

sys.exit(main())
