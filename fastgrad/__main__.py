"""Entry point of python -m fastgrad."""

import sys

from fastgrad.cli import main

sys.exit(main())
