"""Settings as YAML: the same as TOML, numbers and words as people mean them, and one sentence for anything else."""

import sys
from pathlib import Path

import pytest

from freshet.config import load_tables, resolve
from freshet.errors import ConfigError

TOML = """
[method]
name = "fedbuff"
K = 5
[training]
lr = 1e-3
clip = 10.0
[run]
gate = "off"
until = 600.0
[model]
name = "mlp"
hidden = [8, 4]
[data]
lazy = false
"""
YAML = """
method: {name: fedbuff, K: 5}
training:
  lr: 1e-3
  clip: 10.
run:
  gate: off  # a word, not false
  until: 6.0e+2
model:
  name: mlp
  hidden: [8, 4]
data:
  lazy: false
"""


@pytest.mark.parametrize("suffix", ["yaml", "yml", "YAML"])
def test_yaml_and_toml_say_the_same(tmp_path: Path, suffix: str) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / f"a.{suffix}"
    toml.write_text(TOML)
    yaml.write_text(YAML)
    assert load_tables(yaml) == load_tables(toml)
    assert resolve(load_tables(yaml)) == resolve(load_tables(toml))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "no sections"),
        ("", "no sections"),
        ("run: [", "cannot be read as YAML"),
        ("run: &x {until: 5}\ndata: *x\n", "references"),
        ("run: !!python/object/apply:os.system ['true']\n", "cannot be read as YAML"),
        ("[" * 3000, "nested too deeply"),
        ("runn: {until: 5}\n", "is not a known section"),
        ("run: 5\n", "must be a table"),
        ("run: {until: 2026-11-18}\n", "seconds such as 600"),
    ],
)
def test_what_is_no_configuration_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(load_tables(path))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_pyyaml_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text(YAML)
    with pytest.raises(ConfigError, match=r"pip install 'freshet-fl\[yaml\]'"):
        load_tables(tmp_path / "a.yaml")
