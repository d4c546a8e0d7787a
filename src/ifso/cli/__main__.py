"""``python -m ifso.cli`` is the same as ``ifso``."""

import sys

from ifso.cli.main import main

sys.exit(main())
