"""Makes sure a model is on this machine before an engine is built, showing the download."""

from __future__ import annotations

import dataclasses

from trireme.config import Config


def fetched(config: Config, quiet: bool = False) -> Config:
    """The same settings with the model as a path."""
    from trireme.cli.pull import download_bar
    from trireme.hub.resolve import resolve_model

    with download_bar(quiet) as progress:
        path = resolve_model(config.model.model, progress)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(path)))
