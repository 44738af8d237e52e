"""A library that is not installed is one sentence with the command that installs it, before a run begins."""

import sys

import pytest

from freshet import ConfigError
from freshet.integrations.hf_trainer import TransformersTrainer
from freshet.integrations.lightning import LightningTrainer


@pytest.mark.parametrize(
    ("name", "loop", "command"),
    [
        ("lightning", LightningTrainer, r"pip install 'freshet-fl\[lightning\]'"),
        ("transformers", TransformersTrainer, r"pip install 'freshet-fl\[hf\]'"),
        ("accelerate", TransformersTrainer, r"pip install 'freshet-fl\[hf\]'"),
    ],
)
def test_the_message_has_the_command(name, loop, command, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"^trainer: .* is not installed; install it with: {command}$"):
        loop()
