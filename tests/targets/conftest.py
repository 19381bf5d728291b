"""Programs that several targets are tested on, made once. Tests read them and leave them alone."""

from __future__ import annotations

import pytest

from edgec.model import Program

from .programs import cnn_program, decoder_program


@pytest.fixture(scope="session")
def small_cnn(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A depthwise CNN in static INT8, with its float baseline."""
    return cnn_program(tmp_path_factory.mktemp("cnn") / "program")


@pytest.fixture(scope="session")
def small_decoder(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A paged Llama of two layers and two signatures with INT8 weights, with its float baseline."""
    return decoder_program(tmp_path_factory.mktemp("decoder") / "program")
