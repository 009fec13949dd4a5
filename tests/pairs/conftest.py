"""The tiny models of the pairs with their plain bodies, made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .models import Forms
from .plain import Bodies


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Bodies]]:
    """By family."""
    made: dict[str, Bodies] = {}

    def of(family: str) -> Bodies:
        if family not in made:
            made[family] = Bodies(Forms(family, tmp_path_factory.mktemp(family)))
        return made[family]

    yield of
    for opened in made.values():
        opened.close()
