"""The main of an HTTP process: `python -m trireme.api.process`, started by the supervisor."""

from trireme.api.app import create_app
from trireme.serve.http import serve_http

if __name__ == "__main__":
    serve_http(create_app)
