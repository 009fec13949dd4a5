"""`trireme serve` with the tests' own HTTP process: `python -m tests.serve.start_server FOLDER [name=value ...]`."""

import pathlib
import sys

from trireme.config import resolve
from trireme.errors import TriremeError
from trireme.serve.start import serve

if __name__ == "__main__":
    settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
    http_module = settings.pop("http_module", "tests.serve.http_process")
    try:
        config = resolve({"model": sys.argv[1], **settings}, environ={})
        sys.exit(serve(config, pathlib.Path(sys.argv[1]), http_module=http_module))
    except TriremeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
