"""`python -m trireme COMMAND`: the command line where its script is not on the path."""

import sys

from trireme.cli.main import main

sys.exit(main())
